"""The sizes of a scaling study, in rounds that take turns, and what ranks measure of them."""

import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.base.errors import UserError
from samestep.base.run.records import read_records
from samestep.base.settings import Settings
from samestep.prove.profiling import speed_up
from samestep.prove.profiling.scaling_study import (
    FILE,
    MeasuredSetup,
    Segment,
    Setup,
    Study,
    plan_study,
    read_measurement,
    run_study,
)
from samestep.prove.profiling.speed_up import analyse, find_warnings, interval, reasons, scaling_of
from samestep.shell.commands.scale import parse_ranks
from tests.processes import run_ranks
from tests.profiling.made_studies import measured, measurement
from tests.tiny import RECIPE, write_recipe


def sizes(study):
    return [(s.mode, s.ranks, s.global_batch_size, s.micro_batch_size) for s in study.setups]


def test_weak_scaling_keeps_the_batch_of_a_rank_strong_the_global_one_if_it_can():
    study = plan_study(Settings(batch_size=32), [1, 2, 4], ["weak", "strong"])
    assert sizes(study) == [
        ("weak", 1, 32, 32),
        *(("weak", 2, 64, 32), ("strong", 2, 32, 16)),
        *(("weak", 4, 128, 32), ("strong", 4, 32, 8)),
    ]
    assert [s.ranks for s in study.of("strong")] == [1, 2, 4]
    # The settings mean the smallest number of ranks,
    study = plan_study(Settings(batch_size=64), [2, 4], ["strong", "weak"])
    assert sizes(study) == [("strong", 2, 64, 32), ("strong", 4, 64, 16), ("weak", 4, 128, 32)]
    # and micro-steps stay when scaling weakly, and become fewer when strongly: here from four.
    settings = Settings(batch_size=64, micro_batch_size=16)
    study = plan_study(settings, [1, 2], ["weak", "strong"])
    assert sizes(study)[1:] == [("weak", 2, 128, 16), ("strong", 2, 64, 16)]
    study = plan_study(Settings(batch_size=4), [1, 3, 5], ["weak", "strong"])
    assert sizes(study) == [
        ("weak", 1, 4, 4),
        *(("weak", 3, 12, 4), ("strong", 3, 4, 2)),
        ("weak", 5, 20, 4),
    ]
    (note,) = study.left_out
    assert note.startswith("strong scaling at 5 ranks")
    with pytest.raises(UserError, match="--batch-size 4"):
        plan_study(Settings(batch_size=4), [1, 5], ["strong"])


class Launch:  # ranks that measure nothing: each setup leaves made-up segments of ten steps
    def __init__(self):
        self.started, self.folders = [], set()

    def __call__(self, ranks, task):
        self.started.append((ranks, [size for size, *_ in task.setups]))
        for number, (size, _, run) in enumerate(task.setups):
            Path(run).mkdir(parents=True)  # there is none yet
            self.folders.add(Path(run).parent)
            one = Segment(steps=10, samples=10 * size, phases={"forward": 1.0 + number})
            (Path(run) / FILE).write_bytes(msgspec.json.encode(measurement([one, one])))


def test_rounds_take_turns_and_one_start_of_ranks_serves_both_modes(tmp_path):
    study = plan_study(Settings(batch_size=8), [1, 2], ["weak", "strong"])
    launch, told = Launch(), []
    how = {"rounds": 2, "seconds": 1.0, "launch": launch}
    left, found = run_study(study, tmp_path, **how, progress=told.append)
    assert left == study
    assert launch.folders == {tmp_path}
    assert launch.started == [(1, [8]), (2, [16, 8])] * 2
    assert [(one.setup, len(one.rounds)) for one in found] == [(s, 2) for s in study.setups]
    assert found[2].rounds[0].segments[0].seconds == 2.0
    assert told[1] == "round 1 of 2, 2 ranks: weak 160, strong 40 samples/s"


def test_sizes_are_in_order_and_steps_that_the_data_does_not_fill_left_out(tmp_path):
    """1,000 samples: two ranks of 400 have them, four would train 1,600 in name only."""
    study, launch = plan_study(Settings(batch_size=400), [1, 2, 4], ["weak"]), Launch()
    left, found = run_study(study, tmp_path, rounds=2, seconds=1.0, launch=launch, progress=len)
    assert launch.started == [(1, [400]), (2, [800])] * 2
    assert [one.setup.ranks for one in found] == [1, 2]
    (said,) = left.left_out
    assert re.match(r"weak scaling at 4 ranks .* 1,600 .* 1,000 ", said)
    too_large = plan_study(Settings(batch_size=1002), [1, 2], ["strong"])
    with pytest.raises(UserError, match=r"1,002 .* 1,000 .*--batch-size"):
        run_study(too_large, tmp_path / "other", rounds=1, seconds=1.0, launch=launch, progress=len)
    assert parse_ranks("4,1,2,2") == (1, 2, 4)
    for text in ("", "a", "1,b", "0,1", "-1,2", "1", "4", "2,2", "1,65", "1.5,2"):
        with pytest.raises(UserError, match="--nproc"):
            parse_ranks(text)


# Planted: every rank but the first takes 6 ms longer in each step.
SLOW_RANK = RECIPE.replace(
    "    time.sleep(seconds)",
    '    import os\n    time.sleep(0.03 if os.environ.get("RANK", "0") != "0" else 0)',
)


def _measure(recipe: str, setups: list[tuple[int, int, str]], seconds: float) -> int:
    from samestep.core.training.stopping import ReceivedSignal
    from samestep.launch.ranks.world import find_world, join, leave
    from samestep.prove.profiling.scaling_study import measure
    from samestep.shell.commands.train import parse

    _, request = parse([recipe, "--device", "cpu"])
    world = find_world("cpu", "auto")
    join(world)
    received = ReceivedSignal()
    codes = [measure(request, world, received, setup, seconds, 0.0) for setup in setups]
    leave(world)
    return sum(codes) + received.signum


def on_ranks(recipe: Path, ranks: int, batches: list[int], folder: Path) -> list[MeasuredSetup]:
    """Measure some global batches on so many ranks, one after the other in the same processes."""
    setups = [(batch, batch // ranks, str(folder / f"{ranks}-{batch}")) for batch in batches]
    codes = run_ranks(_measure, ranks, folder / f"out-{ranks}", str(recipe), setups, 0.3)
    assert codes == [0] * ranks
    return [
        MeasuredSetup(
            setup=Setup(mode="weak", ranks=ranks, global_batch_size=batch, micro_batch_size=own),
            rounds=[read_measurement(Path(run))],
        )
        for batch, own, run in setups
    ]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Measurements of the recipe with the slow rank: ranks → batches of 12 and 24, and runs."""
    folder = tmp_path_factory.mktemp("scaling")
    recipe = write_recipe(folder, SLOW_RANK)
    return folder, {ranks: on_ranks(recipe, ranks, [12, 24], folder) for ranks in (1, 2)}


def test_it_leaves_segments_of_the_loops_and_a_slow_rank_shows_as_waiting(found):
    folder, measurements = found
    for one in (*measurements[1], *measurements[2]):
        (measurement,) = one.rounds
        batch = one.setup.global_batch_size
        assert len(measurement.segments) >= 2
        assert sum(s.seconds for s in measurement.segments) >= 0.3
        for segment in measurement.segments:
            # An epoch's last batch is smaller, and a slow machine's segment may be that one step.
            ends = segment.steps // (131 // batch) + 1
            assert 0 <= segment.steps * batch - segment.samples < ends * batch
            assert set(segment.phases) >= {"data", "forward", "backward", "all_reduce"}
        assert measurement.threads == 1
        run = folder / f"{one.setup.ranks}-{batch}"
        events = {record["event"] for record in read_records(run)}
        assert not events & {"evaluation", "checkpoint"}
        assert "epoch" in events
        assert not list((run / "checkpoints").glob("*.pt"))
    _, measurements = found
    one, two = measurements[1][0], measurements[2][1]  # 12 samples per rank each
    (phase, lost, _why), *_ = reasons(scaling_of(two, one, "weak"), crowded=False)
    assert phase == "all_reduce"
    assert lost > 15  # of the 30 ms


def test_collated_batches_and_their_terms_are_measured_too(tmp_path):
    recipe = Path(__file__).parents[2] / "examples" / "padded_text.py"
    (one,) = on_ranks(recipe, 2, [16], tmp_path)
    (measurement,) = one.rounds
    assert all(s.samples <= 16 * s.steps for s in measurement.segments)


def test_what_scaling_loses_is_told_by_phase_and_what_does_not_shrink():
    one = measured(ms=[2.0])
    weak = scaling_of(measured(ranks=4, batch=128, ms=[2.0]), one, "weak")
    strong = scaling_of(measured("strong", ranks=4, batch=32, ms=[0.5]), one, "strong")
    for found in (weak, strong):
        assert found.speed_up == pytest.approx(4)
        assert found.efficiency == pytest.approx(1)
        assert sum(found.lost_ms_per_step.values()) == pytest.approx(0)
        assert reasons(found, crowded=False) == []
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


def test_the_interval_is_of_the_noise_and_the_report_fits_a_terminal():
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
    for facts, busy, words in SITUATIONS.values():
        (said,) = find_warnings([crowd(ranks, **more) for ranks, more in facts.items()], busy)
        assert words in said
    # With cores of their own on a quiet machine, ranks are more hardware.
    assert find_warnings([crowd(1), crowd(4), crowd(8)], busy=0.2) == []
    on_gpu = {"device": "cuda", "cores": 2, "threads": 2}
    assert find_warnings([crowd(1, **on_gpu), crowd(4, **on_gpu)]) == []
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
