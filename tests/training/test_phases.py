"""Every run says where the seconds of its steps went; the phases add up to its training time."""

import itertools

import pytest

from samestep.base.phases import DevicePhases, Phases
from samestep.base.run.records import PHASES
from tests import tiny

# 11 steps an epoch. The planted cause sleeps in the phase that it is named after.
SLOW = """
class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(FORWARD)
        return x.clone()
    @staticmethod
    def backward(ctx, g):
        time.sleep(BACKWARD)
        return g
def loss(outputs, targets):
    return nn.functional.cross_entropy(Slow.apply(outputs), targets)
"""
ENGINES = ("native", "lightning")
# Lightning saves at the end of epochs alone.
TINY = tiny.RECIPE.replace('    "checkpoint_every_steps": 4,\n', "")


def epochs(run):
    return tiny.events(run, "epoch")


def with_slow(forward="0.0", backward="0.0"):
    slow = SLOW.replace("FORWARD", forward).replace("BACKWARD", backward)
    return TINY.replace("\nrecipe = ", slow + "\nrecipe = ")


def assert_adds_up(record, names=PHASES):
    assert tuple(record["phases"]) == tuple(names)
    assert all(seconds >= 0 for seconds in record["phases"].values())
    total = sum(record["phases"].values())
    assert total == pytest.approx(record["train_seconds"], rel=0.02, abs=1e-3)


def train_each(folder, flags, *, on, **slow):
    """Train by both engines, with the planted causes; return the records of their epochs."""
    recipe = tiny.write_recipe(folder, with_slow(**slow))
    runs = {engine: folder / engine for engine in ENGINES}
    words = [[recipe, "--run-dir", runs[e], "--engine", e, *flags] for e in ENGINES]
    tiny.train_all(words, on=on, folder=folder)
    return [epochs(run) for run in runs.values()]


def test_time_is_counted_to_the_phase_that_took_it_and_all_phases_add_up(tmp_path):
    flags = ("--epochs", "2")
    for records in train_each(tmp_path, flags, on=1, forward="0.02", backward="0.04"):
        for record in records:
            assert_adds_up(record)
            assert record["phases"]["all_reduce"] == 0
            assert "ranks" not in record
        _, record = records  # Lightning's first epoch has more to begin with
        *_, second, first = sorted(record["phases"], key=record["phases"].get)
        assert (first, second) == ("backward", "forward")
        assert record["phases"]["forward"] >= 0.22
        assert record["phases"]["backward"] >= 0.44


def test_a_rank_that_waits_for_a_slow_one_waits_in_all_reduce_and_the_slow_one_is_named(tmp_path):
    slow = "(0.04 if __import__('os').environ['RANK'] == '1' else 0)"
    flags = ("--epochs", "1", "--accumulate", "2")
    for (record,) in train_each(tmp_path, flags, on=2, backward=slow):
        assert_adds_up(record)
        assert record["phases"]["all_reduce"] >= 0.22
        assert [len(ranks) for ranks in record["ranks"].values()] == [2, 2, 2]
        compute, waited = record["ranks"]["compute"], record["ranks"]["all_reduce"]
        assert compute[1] >= 0.44
        assert compute[1] > compute[0]
        assert waited[0] > waited[1]


def test_a_run_that_stops_within_an_epoch_and_goes_on_still_adds_up(tmp_path):
    run = tmp_path / "run"
    tiny.trained(tiny.write_recipe(tmp_path), run, "--max-steps", "8")
    tiny.resumed(run, "--max-steps", "22")
    for record in epochs(run):
        assert_adds_up(record)
    timed = tiny.events(run, "evaluation", "checkpoint")
    assert {r["event"] for r in timed} == {"evaluation", "checkpoint"}
    assert all(r["seconds"] > 0 for r in timed)


def test_what_is_left_out_counts_to_no_phase_and_a_device_by_events():
    phases = Phases()
    phases.begin()
    phases.lap("forward")
    before = phases.seconds()["forward"]
    with phases.left_out():
        phases.lap("forward")
    assert phases.seconds()["forward"] == before
    phases = Phases(whole=True)
    phases.lap("step")
    phases.lap("forward")
    assert list(phases.total()) == ["data", "to_device", "step", "other"]
    assert phases.total()["step"] > 0
    phases = DevicePhases(Event)
    Event.made = 0
    for _ in range(10_000):
        phases.begin()  # what lies before is no training
        phases.lap("data")
        phases.lap("forward")
    seconds = phases.total()
    assert seconds["data"] == pytest.approx(10.0)
    assert seconds["forward"] == pytest.approx(10.0)
    assert sum(seconds.values()) == pytest.approx(20.0)
    assert Event.made <= 1024
    phases.clear()
    assert sum(phases.total().values()) == 0


class Event:
    """An event of a device that takes a millisecond from one to the next."""

    clock = itertools.count()
    made = 0

    def __init__(self):
        Event.made += 1

    def record(self):
        self.at = next(Event.clock)

    def query(self):
        return True

    def synchronize(self):
        pass

    def elapsed_time(self, later):
        return float(later.at - self.at)
