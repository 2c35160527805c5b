"""Evaluations of a long run on a GPU are compiled; a stand-in compiles in the compiler's place."""

import pytest
import torch
from torch import nn

from samestep import Settings
from samestep.data.blocks import Batch
from samestep.ranks.world import World
from samestep.training.compiled import FullBatches, compiled_forward
from samestep.training.evaluation import evaluate
from samestep.training.plan import make_plan

SAMPLES = 20
X = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = (X[:, 0] > 0).long()


class Batches:
    def evaluation(self, batch_size):
        for x, y in zip(X.split(batch_size), Y.split(batch_size), strict=True):
            yield Batch(x, y, len(x))


@pytest.fixture
def compiled(monkeypatch):
    """Return the rows of each batch that the stand-in for the compiler has run."""
    rows = []

    def stand_in(model, **_options):
        def run(inputs):
            rows.append(len(inputs))
            return model(inputs)

        return run

    monkeypatch.setattr(torch, "compile", stand_in)
    return rows


def test_full_batches_run_compiled_and_the_last_one_as_it_is(compiled):
    """Another size would be another graph, for one batch of each evaluation."""
    model = nn.Linear(3, 2).double()

    def means(forward):
        how = {"world": World(), "batch_size": 8, "precision": "fp64", "seed": 1}
        return evaluate(model, Batches(), nn.functional.cross_entropy, {}, forward=forward, **how)

    assert means(FullBatches(model, 8)) == means(None)
    assert compiled == [8, 8]


LONG = {"epochs": 100, "compile": "on"}


@pytest.mark.parametrize(
    ("told", "device", "compiles"),
    [
        ({}, "cuda", True),
        ({}, "cpu", False),
        ({}, "mps", False),
        ({"compile": "off"}, "cuda", False),
        ({"epochs": 5}, "cuda", False),
        ({"epochs": 5, "eval_every_steps": 10}, "cuda", True),
        ({"eval_every_epochs": 20}, "cuda", False),
        ({"eval_batch_size": 1000}, "cuda", False),
    ],
)
@pytest.mark.usefixtures("compiled")
def test_it_pays_on_a_gpu_in_runs_that_evaluate_much(told, device, compiles):
    settings = Settings(batch_size=10, **{**LONG, **told})
    plan = make_plan(settings, 2000, 1)
    world = World(device=torch.device(device))
    made = compiled_forward(nn.Linear(3, 2), settings, world, plan, num_samples=1000)
    assert (made is not None) == compiles
