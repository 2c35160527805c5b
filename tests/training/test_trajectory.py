"""The promise of the same step, tried with real processes."""

import json
from pathlib import Path

import pytest

from samestep import read_records
from tests.ranks import samestep

# 509 training samples and a global batch of 24: no world size here divides the data, and the
# last global batch is incomplete.
RECIPE = """
import torch
from torch import nn
from samestep import Recipe, Splits

def data():
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(609, 8, generator=generator, dtype=torch.float64)
    y = (x[:, 0] * x[:, 1] > 0).long()
    return Splits(train=(x[:509], y[:509]), validation=(x[509:], y[509:]), test=(x[509:], y[509:]))

def model():
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2))

recipe = Recipe(model=model, data=data, settings={"epochs": 2, "global_batch_size": 24, "lr": 0.01})
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "small.py"
    path.write_text(RECIPE)
    return str(path)


def train(recipe: str, folder: Path, name: str, *flags: str, world_size: int = 1):
    run = folder / name
    ranks = samestep(
        "train", recipe, "--run-dir", str(run), "--log-every", "1", *flags,
        world_size=world_size, folder=folder / f"{name}-output",
    )  # fmt: skip
    assert [p.exitcode for p in ranks.processes] == [0] * world_size, ranks.output()
    return [r for r in read_records(run) if r["event"] in ("step", "evaluation", "epoch")]


def worst(one, other) -> float:
    assert len(one) == len(other)
    fields = [
        (a[name], b[name])
        for a, b in zip(one, other, strict=True)
        for name in ("loss", "grad_norm", "accuracy", "samples")
        if name in a
    ]
    return max(abs(a - b) / max(abs(a), abs(b), 1e-300) for a, b in fields)


@pytest.mark.parametrize("flags", [(), ("--clip-norm", "0.05", "--optimizer", "sgd")])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-12), ("fp32", 1e-5)])
def test_loss_and_gradient_norm_are_those_of_one_process_on_any_number_of_ranks(
    recipe, tmp_path, precision, tolerance, flags
):
    flags = ("--precision", precision, *flags)
    one = train(recipe, tmp_path, "one", *flags)
    for size in (2, 3, 4):
        many = train(recipe, tmp_path, f"ranks{size}", *flags, world_size=size)
        assert worst(one, many) < tolerance
    assert json.dumps(one) != "[]"
