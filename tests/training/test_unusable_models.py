"""Models that a strategy cannot train are refused in words, not with a framework's traceback."""

from pathlib import Path

import pytest

from tests.processes import samestep

RECIPE = """
import torch
from torch import nn
from samestep import Recipe, Splits

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(4, 2)
        self.forgotten = nn.Linear(4, 2)
    def forward(self, x):
        {forward}

def data():
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return Splits(train=(x, (x[:, 0] > 0).long()))

recipe = Recipe(model=Model, data=data, settings={{"epochs": 2, "batch_size": 8}})
"""


def run(folder: Path, forward: str, *flags: str, world_size: int = 1):
    path = folder / "mine.py"
    path.write_text(RECIPE.format(forward=forward))
    return samestep(
        "train",
        str(path),
        "--run-dir",
        str(folder / "run"),
        *flags,
        world_size=world_size,
        folder=folder / "output",
    )


@pytest.mark.parametrize("engine", ["native", "lightning"])
def test_a_parameter_that_the_loss_does_not_depend_on_is_named_before_ranks_wait_for_it(
    tmp_path, engine
):
    ranks = run(tmp_path, "return self.used(x)", "--engine", engine, world_size=2)
    assert [p.exitcode for p in ranks.processes] == [2, 2], ranks.output()
    assert "forgotten.weight, forgotten.bias" in ranks.printed(0)
    assert "Traceback" not in ranks.output()


def test_one_process_trains_a_model_with_a_parameter_that_is_not_used(tmp_path):
    ranks = run(tmp_path, "return self.used(x)")
    assert [p.exitcode for p in ranks.processes] == [0], ranks.output()


@pytest.mark.parametrize("flag", ["on", "off"])
def test_a_model_that_cannot_be_compiled_is_refused_only_when_compiling_was_asked_for(
    tmp_path, flag
):
    forward = "a, b = self.used(x), self.forgotten(x); return a + b if x.sum() > 0 else a - b"
    ranks = run(tmp_path, forward, "--compile", flag)
    assert [p.exitcode for p in ranks.processes] == [2 if flag == "on" else 0], ranks.output()
    assert ("--compile off" in ranks.printed(0)) == (flag == "on")
    assert "Traceback" not in ranks.output()
