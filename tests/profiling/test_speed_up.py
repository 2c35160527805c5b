"""Speed-up, efficiency and losses of measurements whose every number is known."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.profiling import speed_up
from samestep.profiling.scaling_study import Study
from samestep.profiling.speed_up import analyse, find_warnings, interval, reasons, scaling_of
from tests.profiling.made_studies import measured, measurement


def test_ideal_scaling_is_an_efficiency_of_one_and_loses_nothing():
    one = measured(ms=[2.0])
    weak = scaling_of(measured(ranks=4, batch=128, ms=[2.0]), one, "weak")
    strong = scaling_of(measured("strong", ranks=4, batch=32, ms=[0.5]), one, "strong")
    for found in (weak, strong):
        assert found.speed_up == pytest.approx(4)
        assert found.efficiency == pytest.approx(1)
        assert sum(found.lost_ms_per_step.values()) == pytest.approx(0)
        assert reasons(found, crowded=False) == []


def test_what_is_lost_is_told_by_phase():
    one = measured(ms=[2.0], data=0.5)
    two = scaling_of(measured(ranks=2, batch=64, ms=[3.0], data=0.6, all_reduce=0.9), one, "weak")
    assert two.speed_up == pytest.approx(2 * 2 / 3)
    assert two.lost_ms_per_step == {
        name: pytest.approx(ms)
        for name, ms in {"data": 0.1, "all_reduce": 0.9, "forward": 0.0}.items()
    }
    first, second = reasons(two, crowded=False)
    assert first[:2] == ("all_reduce", pytest.approx(0.9))
    assert second[:2] == ("data", pytest.approx(0.1))


def test_in_strong_scaling_what_does_not_shrink_is_lost():
    one = measured(ms=[2.0], optimizer=0.4)
    two = scaling_of(measured("strong", ranks=2, ms=[1.2], optimizer=0.4), one, "strong")
    assert two.lost_ms_per_step["optimizer"] == pytest.approx(0.2)
    assert two.lost_ms_per_step["forward"] == pytest.approx(0)
    ((phases, lost, why),) = reasons(two, crowded=False)
    assert "optimizer" in phases
    assert lost == pytest.approx(0.2)
    assert why


@settings(max_examples=25)
@given(
    st.lists(st.floats(0.1, 10), min_size=1, max_size=4),
    st.lists(st.floats(0.1, 10), min_size=1, max_size=4),
    st.sampled_from(["weak", "strong"]),
)
def test_losses_add_up_to_the_step_above_the_ideal(base, more, mode):
    one = measured(ms=base, rounds=len(base), data=0.01)
    other = measured(mode, ranks=4, batch=128, ms=more, rounds=len(more), all_reduce=0.02)
    if len(base) == len(more):
        found = scaling_of(other, one, mode)
        ideal = sum(base) / len(base) / (4 if mode == "strong" else 1)
        assert sum(found.lost_ms_per_step.values()) == pytest.approx(sum(more) / len(more) - ideal)


def test_without_noise_the_interval_is_a_point_and_with_it_holds_the_estimate():
    one, two = measured(ms=[2.0]), measured(ranks=2, batch=64, ms=[2.5])
    assert interval(two.rounds, one.rounds) == (pytest.approx(1.6), pytest.approx(1.6))
    one, two = measured(ms=[2.0, 2.4, 1.9]), measured(ranks=2, batch=64, ms=[2.5, 2.4, 3.0])
    found = scaling_of(two, one, "weak")
    low, high = found.speed_up_interval
    assert low < found.speed_up < high
    assert found.efficiency_interval == (pytest.approx(low / 2), pytest.approx(high / 2))
    # What slows a whole round cancels.
    one = measured(ms=[1.0, 5.0, 2.0])
    two = measured(ranks=2, batch=64, ms=[1.5, 7.5, 3.0])
    assert interval(two.rounds, one.rounds) == (pytest.approx(4 / 3), pytest.approx(4 / 3))


def crowd(ranks, **facts):
    found = measured(ranks=ranks, batch=32 * ranks, rounds=1)
    segments = found.rounds[0].segments
    return type(found)(setup=found.setup, rounds=[measurement(segments, **facts)])


# Facts of each number of ranks, cores that other work keeps busy, and what the warning names.
SITUATIONS = {
    "more ranks than cores": ({1: {"cores": 2}, 4: {"cores": 2}}, 0.0, "4 ranks share 2 "),
    "more threads": ({1: {"cores": 8}, 2: {"cores": 8, "threads": 8}}, 0.0, "2 ranks share 8 "),
    "one rank had all cores": ({1: {"threads": 8}, 2: {"threads": 4}}, 0.0, "8 threads"),
    "a shared GPU": ({1: {"device": "cuda"}, 2: {"device": "cuda", "sharing_gpu": 2}}, 0.0, "GPU"),
    "other work": ({1: {}, 2: {}}, 1.5, " 1.5 cores"),
}


def test_what_makes_more_ranks_no_more_hardware_is_said_and_nothing_else():
    for facts, busy, words in SITUATIONS.values():
        (said,) = find_warnings([crowd(ranks, **more) for ranks, more in facts.items()], busy)
        assert words in said
    # With cores of their own on a quiet machine, ranks are more hardware.
    assert find_warnings([crowd(1), crowd(4), crowd(8)], busy=0.2) == []
    on_gpu = {"device": "cuda", "cores": 2, "threads": 2}
    assert find_warnings([crowd(1, **on_gpu), crowd(4, **on_gpu)]) == []


def test_the_report_fits_a_terminal_and_names_the_cause():
    found = [
        measured(ms=[2.0], data=0.2, all_reduce=0.0),
        measured("weak", ranks=2, batch=64, ms=[3.0, 3.2, 3.1], data=0.2, all_reduce=1.0),
        measured("strong", ranks=2, batch=32, ms=[1.6], data=0.2, all_reduce=0.3),
    ]
    study = Study(setups=tuple(one.setup for one in found), left_out=("x is left out: because",))
    told = analyse("toy", study, found, ["weak", "strong"], 1.5, 3.0)
    text = list(speed_up.report_lines(told))
    assert max(map(len, text)) <= 80
    assert text[0] == "2 ranks are 1.29 times as fast as 1 here: a gain, at 65% of the ideal."
    assert "2 ranks are 1.25 times as fast as 1 here: a gain, at 62% of the ideal." in text
    joined = " ".join(" ".join(text).split())
    assert re.search(r"At 2 ranks [^;]* 3\.100 ms [^;]* 2\.000 [^;]*: all_reduce \+1\.0", joined)
    assert re.search(r"At 2 ranks [^;]* 1\.600 ms [^;]* 1\.000 [^;]*\(that of 1 rank / 2\)", joined)
    assert "x is left out" in joined
    assert '"speed_up": 1.29' in told.as_json()
