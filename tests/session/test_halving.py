"""Which trainings of a sweep go on past a rung."""

import math
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.ranks.world import World
from samestep.run.directory import SWEEP
from samestep.session.halving import halving_of

MODES = st.sampled_from(["min", "max"])


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.integers(2, 5), MODES)
@settings(max_examples=40)
def test_at_a_rung_the_best_nth_of_those_that_came_so_far_go_on(values, factor, mode):
    with tempfile.TemporaryDirectory() as place:
        sweep = Path(place)
        (sweep / SWEEP).touch()
        for come, value in enumerate(values, 1):
            is_hopeless = halving_of(sweep / f"run-{come}", factor, mode, World())
            best_first = sorted(values[:come], reverse=mode == "max")
            worst_that_goes_on = best_first[max(1, come // factor) - 1]
            goes_on = value <= worst_that_goes_on if mode == "min" else value >= worst_that_goes_on
            assert is_hopeless(factor, value) == (not goes_on)


@given(st.integers(2, 5), st.integers(1, 130))
@settings(max_examples=40)
def test_between_the_rungs_all_go_on(factor, epoch):
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / SWEEP).touch()
        best, worst = (halving_of(Path(place, name), factor, "min", World()) for name in "ab")
        assert not best(epoch, 0.0)
        assert worst(epoch, 1.0) == (epoch in {factor**k for k in range(9)})


def test_a_metric_that_is_no_number_is_the_worst(tmp_path):
    (tmp_path / SWEEP).touch()
    first, second = (halving_of(tmp_path / name, 2, "max", World()) for name in "ab")
    assert not first(1, -5.0)
    assert second(1, math.nan)
