"""Replayed steps and compiled evaluations, with stand-ins for CUDA and the compiler."""

import pytest
import torch
from torch import nn

from samestep import Settings
from samestep.core.data.source import Batch
from samestep.core.plan import make_plan
from samestep.core.training.compiled import FullBatches, compiled_forward
from samestep.core.training.evaluation import Totals, evaluate
from samestep.core.training.step_graph import Replayed, replayed_on
from samestep.launch.ranks.world import World
from tests.captures import Captures


class Adds:
    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, kept, fed):
        self.runs += 1
        ((total,),) = kept
        total += fed["summand"] * fed["factor"]
        return total.clone(), [2 * total]


def kept_at(value: float = 0.0):
    return [[torch.full((3,), value)]]


def fed(summand: float, rows: int = 3, factor: float = 1.0):
    return {"summand": torch.full((rows,), summand), "factor": torch.tensor(factor)}


def test_every_call_counts_once_and_tensors_at_other_addresses_are_captured_anew():
    captures, adds, kept = Captures(), Adds(), kept_at()
    replayed, results = Replayed(adds, captures), []
    for number in (1.0, 2.0, 4.0, 8.0):
        given = fed(number, factor=10.0)
        results.append(replayed(kept, given))
        given["summand"].fill_(100.0)  # what a call is fed with may change afterwards
    assert [float(total[0]) for total, _ in results] == [10.0, 30.0, 70.0, 150.0]
    assert all(torch.equal(double, 2 * total) for total, (double,) in results)
    assert float(kept[0][0][0]) == 150.0
    assert (captures.captured, captures.replayed) == (1, 3)
    assert replayed.why_not == ""
    captures, kept, other = Captures(), kept_at(), kept_at(100.0)
    replayed = Replayed(Adds(), captures)
    replayed(kept, fed(1.0))
    replayed(kept, fed(1.0))
    for expected in (101.0, 102.0):
        total, _ = replayed(other, fed(1.0))
        assert float(total[0]) == expected
    assert float(kept[0][0][0]) == 2.0
    replayed([[other[0][0].detach()]], fed(1.0))  # the same memory by another name
    assert (captures.captured, captures.replayed) == (2, 3)


@pytest.mark.parametrize("odd", [fed(1.0, rows=1), {**fed(1.0), "factor": torch.tensor(1)}])
def test_other_shapes_and_types_run_uncaptured(odd):
    captures, adds, kept = Captures(), Adds(), kept_at()
    replayed = Replayed(adds, captures)
    for given in (fed(1.0), odd, fed(1.0)):
        replayed(kept, given)
    assert float(kept[0][0][0]) == 3.0
    assert (captures.captured, captures.replayed) == (1, 1)


def test_what_cannot_be_captured_runs_as_it_is():
    """Ending a broken capture raises another error, which says nothing of the cause."""

    def capture(_function):
        try:
            raise RuntimeError("operation not permitted when stream is capturing\nmore of it")
        finally:
            raise ValueError("operation failed due to a previous error")

    adds, kept = Adds(), kept_at()
    replayed = Replayed(adds, capture)
    for expected in (1.0, 2.0, 3.0):
        total, _ = replayed(kept, fed(1.0))
        assert float(total[0]) == expected
    assert adds.runs == 3
    assert replayed.why_not == "RuntimeError: operation not permitted when stream is capturing"
    captures, adds = Captures(), Adds()
    replayed, kept = Replayed(lambda kept, fed: adds(kept[:1], fed), captures), kept_at()
    elsewhere = [torch.zeros(1, device="meta")]
    for _ in range(3):
        replayed([*kept, elsewhere], fed(1.0))
    assert float(kept[0][0][0]) == 3.0
    assert captures.captured == 0
    assert "meta" in replayed.why_not
    assert replayed_on(torch.device("cpu"), Adds()) is None
    assert replayed_on(torch.device("mps"), Adds()) is None
    assert isinstance(replayed_on(torch.device("cuda"), Adds()), Replayed)


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
        how = {"batch_size": 8, "precision": "fp64", "seed": 1, "forward": forward}
        return evaluate(model, Batches(), Totals(nn.functional.cross_entropy, {}, World()), **how)

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
    plan, world = make_plan(settings, 2000, 1), World(device=torch.device(device))
    made = compiled_forward(nn.Linear(3, 2), settings, world, plan, num_samples=1000)
    assert (made is not None) == compiles
