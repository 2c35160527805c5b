"""The handbook's reference says what the source says."""

import ast
import re
from pathlib import Path

import pytest

import samestep
from samestep.ranks import launch
from tools.reference import REFERENCE, outdated

SOURCE = Path(samestep.__file__).parent
VARIABLE = re.compile(
    r"(SAMESTEP|SLURMD?|SBATCH|OMPI|PMIX?|MPI|OMP|NCCL|GLOO|CUDA|CUBLAS|TORCH[A-Z]*|XDG|COMET|WANDB"
    r"|MLFLOW|KINETO|HF)_[A-Z_a-z]*[A-Za-z]|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_(RANK|WORLD_SIZE)"
    r"|MASTER_(ADDR|PORT)|TMPDIR|NETRC|HTTPS_PROXY|PYTHONPATH|MPLBACKEND"
)
"""What the source names in quotes and an environment may have."""
NOT_READ = {"SLURM_TASK_PID"}
"""Of other processes, to tell tasks of the sandbox apart."""


@pytest.fixture(scope="module")
def page() -> str:
    return (REFERENCE / "environment.md").read_text()


def test_each_generated_page_is_up_to_date():
    """Where it is not, `python tools/reference.py` writes it."""
    assert [str(path) for path, _ in outdated()] == []


def test_each_variable_that_the_source_names_is_in_the_reference(page):
    named = {*launch.OPEN_MPI, *launch.PMI, *launch.MPI_JOB_IDS}
    for file in SOURCE.rglob("*.py"):
        nodes = ast.walk(ast.parse(file.read_text()))
        texts = {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        named |= {text for text in texts if VARIABLE.fullmatch(text)}
    assert len(named) > 80
    assert {name for name in named - NOT_READ if f"`{name}`" not in page} == set()


def test_each_variable_in_the_reference_is_in_the_source(page):
    written = "\n".join(file.read_text() for file in SOURCE.rglob("*.py"))
    tables = page.partition("## What a run records")[0]
    tables = tables.replace("Variables of the libraries, such as `NCCL_DEBUG`", "")
    for name in re.findall(r"`([A-Z]+(?:_[A-Za-z]+)+|RANK|TMPDIR|NETRC)`", tables):
        # Some names are put together there, from a prefix and a list.
        assert any(
            part in written
            for part in (name, re.sub(r"^[A-Z]+_(?:COMM_WORLD_|TRACKING_)?", "", name))
        ), name
