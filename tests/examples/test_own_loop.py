"""The example of a loop of one's own: few lines more than a plain loop, and the same training."""

import difflib
import json
import re
import signal
import textwrap
from pathlib import Path

import pytest
import torch

from samestep import read_records
from samestep.shell.cli import main
from tests.session.same import account, assert_same
from tests.session.scripts import EXAMPLES, Strike, run

SCRIPT = EXAMPLES / "own_loop.py"
PLAIN = Path(__file__).parent / "plain_loop.py"


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    ranks = run(SCRIPT, "run", folder=folder)
    assert "samestep:" not in ranks.output()
    return folder / "run"


@pytest.fixture(scope="module")
def resumed(tmp_path_factory) -> Path:
    """A run that was stopped on two ranks, with unequal shares, and went on on three."""
    folder = tmp_path_factory.mktemp("resumed")
    stop = {"strike": Strike(21, signal.SIGTERM), "code": 128 + signal.SIGTERM}
    run(SCRIPT, "run", world_size=2, folder=folder, **stop)
    printed = run(SCRIPT, "run", world_size=3, folder=folder).output()
    # The ranks agree to stop where they meet next, within the second epoch or at its end.
    after = [int(epoch) for epoch in re.findall("^epoch (.)", printed, re.MULTILINE)]
    assert after in ([2, 3, 4, 5], [3, 4, 5])
    assert "epoch 5" in (folder / "run" / "rank-1.log").read_text()
    return folder / "run"


def test_it_takes_at_most_ten_lines_more_than_the_plain_loop():
    def lines(path: Path) -> list[str]:
        text = path.read_text().split('"""\n', maxsplit=1)[1]  # without the docstring
        return [line.strip() for line in text.splitlines() if line.strip()]

    differ = [line for line in difflib.ndiff(lines(PLAIN), lines(SCRIPT)) if line[0] == "+"]
    assert 5 < len(differ) <= 10, "\n".join(differ)


def test_a_run_that_was_stopped_goes_on_on_other_ranks_as_compare_tells(alone, resumed, capsys):
    assert_same(resumed, alone)
    assert main(["compare", str(alone), str(resumed), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["same_training"][0]["verdict"] in ("equal", "rounding")


def test_the_records_are_of_all_samples_and_a_finished_run_is_left_as_it_is(alone, tmp_path):
    (start,) = (r for r in read_records(alone) if r["event"] == "start")
    assert (start["num_samples"], start["global_batch_size"], start["steps_per_epoch"]) == (
        *(1000, 64),
        16,
    )
    epochs = [r for r in account(alone) if r["event"] == "epoch"]
    assert [(r["epoch"], r["step"], r["samples"]) for r in epochs] == [
        (n, 16 * n, 1000) for n in range(1, 6)
    ]
    assert epochs[-1]["loss"] < 0.1 * epochs[0]["loss"]
    records = (alone / "events.jsonl").read_bytes()
    run(SCRIPT, str(alone), folder=tmp_path)
    assert (alone / "events.jsonl").read_bytes() == records


def programs_of_the_page() -> tuple[str, str, str]:
    """Return the three programs of "Port your loop", and the plain one in samestep's order."""
    page = (EXAMPLES.parent / "docs" / "how-to" / "port-your-loop.md").read_text()
    plain, own, recipe, ordered = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[:4]
    head, _, body = plain.partition("    model.train()\n")
    plain = f"{head}{textwrap.indent(ordered, '    ')}    model.train()\n{body}"
    return plain, own, recipe


def test_the_three_programs_of_the_handbook_have_the_same_losses(tmp_path, monkeypatch, capsys):
    plain, own, recipe = programs_of_the_page()
    assert len(plain.splitlines()) <= 70
    found = {}
    for name, size, text in (("plain", 1, plain), ("own", 2, own)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "ported.py").write_text(text)
        how = {"world_size": size, "folder": tmp_path / name}
        said = run(tmp_path / name / "ported.py", **how).output()
        found[name] = [
            float(text) for text in re.findall(r"^epoch .* loss (.*)", said, re.MULTILINE)
        ]
        assert "best" in said
    monkeypatch.chdir(tmp_path)
    Path("recipe.py").write_text(recipe)
    precise = ["--precision", "fp64"]  # as the scripts are run here
    torch.set_default_dtype(torch.float64)
    try:
        assert main(["train", "recipe.py", "--run-dir", "recipe", "--device", "cpu", *precise]) == 0
    finally:
        torch.set_default_dtype(torch.float32)
    found["recipe"] = [r["loss"] for r in read_records("recipe") if r["event"] == "evaluation"]
    assert 5 < len(found["plain"]) < 30
    for name in ("own", "recipe"):
        assert found[name] == pytest.approx(found["plain"], abs=1e-5), name
