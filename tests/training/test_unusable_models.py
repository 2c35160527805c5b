"""Models that a strategy cannot train are refused in words, not with a framework's traceback."""

from pathlib import Path

import pytest

from tests import tiny
from tests.command_line import refusal

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


def write(folder: Path, forward: str) -> Path:
    return tiny.write_recipe(folder, RECIPE.format(forward=forward), "mine.py")


@pytest.mark.parametrize("engine", ["native", "lightning"])
def test_a_parameter_that_the_loss_does_not_depend_on_is_named_before_ranks_wait_for_it(
    tmp_path, engine
):
    words = ("train", str(write(tmp_path, "return self.used(x)")), "--engine", engine)
    words += ("--run-dir", str(tmp_path / "run"))
    told = refusal(*words, world_size=2, folder=tmp_path / "output")
    assert "forgotten.weight, forgotten.bias" in told


def test_one_process_trains_a_model_with_a_parameter_that_is_not_used(tmp_path):
    tiny.trained(write(tmp_path, "return self.used(x)"), tmp_path / "run")


def test_a_model_that_cannot_be_compiled_is_refused_only_when_compiling_was_asked_for(
    refused, tmp_path
):
    forward = "a, b = self.used(x), self.forgotten(x); return a + b if x.sum() > 0 else a - b"
    recipe, run = write(tmp_path, forward), tmp_path / "run"
    told = refused("train", str(recipe), "--run-dir", str(run), "--compile", "on")
    assert "--compile off" in told
    tiny.trained(recipe, tmp_path / "eager", "--compile", "off")
