"""The notebook of first steps: executed from end to end, and its kept outputs."""

import os

import nbclient
import nbformat
import pytest

from tests.examples.programs import ROOT
from tests.processes import TIMEOUT_S

NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"


def last_results(notebook) -> list[str]:
    return [
        output["data"]["text/plain"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.output_type == "execute_result"
    ]


@pytest.mark.slow
def test_the_notebook_trains_loads_predicts_verifies_and_takes_two_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        cell.pop("outputs", None) if cell.cell_type == "markdown" else cell.update(outputs=[])
    place = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(notebook, timeout=TIMEOUT_S, resources=place)
    client.execute()
    shown = last_results(notebook)
    assert shown[-1] == "(25, 'completed')"
    assert shown[-2].startswith("(True,")
    assert shown[-3].startswith(("('equal', 20,", "('rounding', 20,"))
    assert len(list((tmp_path / "runs").iterdir())) == 3
    streams = [o for c in notebook.cells for o in c.get("outputs", []) if o.output_type == "stream"]
    assert not [output.text for output in streams if output.name == "stderr"]


def test_its_kept_outputs_are_of_a_whole_execution():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [o for cell in code for o in cell.outputs if o.output_type == "error"]
    assert last_results(notebook)[-2].startswith("(True,")
