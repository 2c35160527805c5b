"""What is replayed changes what it should once per call; a stand-in captures in CUDA's place."""

import pytest
import torch

from samestep.training.step_graph import Replayed, replayed_on
from tests.captures import Captures


class Adds:
    """Adds what it is fed with to what it keeps, and returns the sum and the double of it."""

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


def test_every_call_counts_once_and_the_first_one_captures():
    captures, adds, kept = Captures(), Adds(), kept_at()
    replayed = Replayed(adds, captures)
    results = []
    for number in (1.0, 2.0, 4.0, 8.0):
        given = fed(number, factor=10.0)
        results.append(replayed(kept, given))
        given["summand"].fill_(100.0)  # what a call is fed with may change afterwards
    assert [float(total[0]) for total, _ in results] == [10.0, 30.0, 70.0, 150.0]
    assert all(torch.equal(double, 2 * total) for total, (double,) in results)
    assert float(kept[0][0][0]) == 150.0
    assert (captures.captured, captures.replayed) == (1, 3)
    assert replayed.why_not == ""


def test_tensors_at_other_addresses_are_captured_anew():
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


def test_what_cannot_be_captured_runs_as_it_is_and_the_first_error_is_told():
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


def test_what_is_partly_on_the_host_is_not_captured():
    """Capturing would count its steps once more, and a replay would not count them."""
    captures, adds = Captures(), Adds()
    replayed, kept = Replayed(lambda kept, fed: adds(kept[:1], fed), captures), kept_at()
    elsewhere = [torch.zeros(1, device="meta")]
    for _ in range(3):
        replayed([*kept, elsewhere], fed(1.0))
    assert float(kept[0][0][0]) == 3.0
    assert captures.captured == 0
    assert "meta" in replayed.why_not


def test_only_a_gpu_of_nvidia_replays():
    assert replayed_on(torch.device("cpu"), Adds()) is None
    assert replayed_on(torch.device("mps"), Adds()) is None
    assert isinstance(replayed_on(torch.device("cuda"), Adds()), Replayed)
