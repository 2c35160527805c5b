"""Garbage is put off while modules are imported, and never while someone's code trains."""

import gc
import subprocess
import sys

import pytest

from tests.command_line import RECIPE

USUAL = gc.get_threshold()
SAYS = (
    "import gc\nprint('state', gc.get_threshold(), gc.get_freeze_count() > 100_000, flush=True)\n"
)
SCRIPT = f"""
import torch
{SAYS}
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3000):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).mean().backward()
    optimizer.step()
"""


def asks(folder, *arguments: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-m", "samestep", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {line for line in done.stdout.splitlines() if line.startswith("state ")}


@pytest.mark.parametrize(
    "more", [(), pytest.param(("--nproc", "2", "--engine", "lightning"), marks=pytest.mark.slow)]
)
def test_a_recipe_is_collected_as_usual_and_without_the_modules(tmp_path, more):
    says = "\n".join(f"    {line}" for line in SAYS.splitlines())
    text = RECIPE.replace("def model():\n", f"def model():\n{says}\n")
    (tmp_path / "recipe.py").write_text(text)
    assert asks(tmp_path, "train", "recipe.py", *more) == {f"state {USUAL} True"}


def test_a_script_that_is_profiled_is_collected_as_usual(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    assert asks(tmp_path, "profile", "script.py", "--seconds", "0.1") == {f"state {USUAL} True"}


def test_who_imports_samestep_keeps_a_collector_of_their_own(tmp_path):
    code = (
        "import gc; gc.set_threshold(70, 7, 7)\n"
        "import samestep; samestep.dist.setup_distributed(); samestep.dist.cleanup()\n"
        "assert (gc.get_threshold(), gc.get_freeze_count()) == ((70, 7, 7), 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
