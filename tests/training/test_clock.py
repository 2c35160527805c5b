"""The clock of a training counts its steps' seconds and nothing else, on a clock of our own."""

from types import SimpleNamespace

import pytest

from samestep.training import meter
from samestep.training.meter import Clock
from samestep.training.work import Position


@pytest.fixture
def now(monkeypatch) -> SimpleNamespace:
    """A clock that a test sets: `now.s` is what it shows."""
    now = SimpleNamespace(s=1000.0)
    monkeypatch.setattr(meter, "time", SimpleNamespace(perf_counter=lambda: now.s))
    return now


def test_seconds_add_up_over_attempts(now):
    counted = Clock(Position(seconds=5.0))
    now.s += 2.0
    assert counted.seconds() == 7.0


def test_a_pause_between_steps_does_not_count(now):
    position = Position()
    counted = Clock(position)
    now.s += 3.0
    position.seconds = counted.seconds()
    now.s += 100.0  # an evaluation and a checkpoint
    counted.resume(position)
    now.s += 1.0
    assert counted.seconds() == 4.0


def test_seconds_of_compiling_are_left_out(now):
    counted = Clock(Position())
    now.s += 40.0
    counted.leave_out(30.0)
    assert counted.seconds() == 10.0


def test_the_rate_is_that_of_the_samples_since_the_last_mark(now):
    position = Position(samples=1000)
    counted = Clock(position)
    now.s += 2.0
    position.samples += 100
    assert counted.rate(position) == {"seconds": 2.0, "samples_per_s": 50.0}
    counted.mark(position)
    now.s += 1.0
    position.samples += 300
    assert counted.rate(position) == {"seconds": 3.0, "samples_per_s": 300.0}


def test_a_rate_over_no_time_is_a_number(now):
    position = Position()
    counted = Clock(position)
    assert counted.rate(position)["samples_per_s"] == 0.0


def test_a_progress_bar_moves_a_few_times_a_second(now):
    counted = Clock(Position())
    shown = 0
    for _ in range(1000):  # ten seconds
        now.s += 0.01
        shown += counted.shows()
    assert 10 <= shown <= 100
