"""The sizes of a scaling study, in rounds that take turns, and what ranks measure of them."""

import re
from pathlib import Path

import msgspec
import pytest

from samestep.commands.scale import parse_ranks
from samestep.errors import UserError
from samestep.profiling.scaling_study import (
    FILE,
    MeasuredSetup,
    Segment,
    Setup,
    plan_study,
    read_measurement,
    run_study,
)
from samestep.profiling.speed_up import reasons, scaling_of
from samestep.run.records import read_records
from samestep.settings import Settings
from tests.processes import run_ranks
from tests.profiling.made_studies import measurement
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


class Launch:
    """Ranks that measure nothing: each setup leaves made-up segments of ten steps."""

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
    left, found = run_study(study, tmp_path, rounds=2, seconds=1.0, launch=launch, tell=told.append)
    assert left == study
    assert launch.folders == {tmp_path}
    assert launch.started == [(1, [8]), (2, [16, 8])] * 2
    assert [(one.setup, len(one.rounds)) for one in found] == [(s, 2) for s in study.setups]
    assert found[2].rounds[0].segments[0].seconds == 2.0
    assert told[1] == "round 1 of 2, 2 ranks: weak 160, strong 40 samples/s"


def test_sizes_are_in_order_and_steps_that_the_data_does_not_fill_left_out(tmp_path):
    """1,000 samples: two ranks of 400 have them, four would train 1,600 in name only."""
    study, launch = plan_study(Settings(batch_size=400), [1, 2, 4], ["weak"]), Launch()
    left, found = run_study(study, tmp_path, rounds=2, seconds=1.0, launch=launch, tell=len)
    assert launch.started == [(1, [400]), (2, [800])] * 2
    assert [one.setup.ranks for one in found] == [1, 2]
    (said,) = left.left_out
    assert re.match(r"weak scaling at 4 ranks .* 1,600 .* 1,000 ", said)
    too_large = plan_study(Settings(batch_size=1002), [1, 2], ["strong"])
    with pytest.raises(UserError, match=r"1,002 .* 1,000 .*--batch-size"):
        run_study(too_large, tmp_path / "other", rounds=1, seconds=1.0, launch=launch, tell=len)
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
    from samestep.commands.train import parse
    from samestep.profiling.scaling_study import measure
    from samestep.ranks.world import find_world, join, leave
    from samestep.training.stopping import ReceivedSignal

    _, request = parse([recipe, "--device", "cpu"])
    world = find_world("cpu", "auto")
    join(world)
    received = ReceivedSignal()
    codes = [measure(request, world, received, setup, seconds, 0.0) for setup in setups]
    leave(world)
    return sum(codes) + received.signum


def measured(recipe: Path, ranks: int, batches: list[int], folder: Path) -> list[MeasuredSetup]:
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
    return folder, {ranks: measured(recipe, ranks, [12, 24], folder) for ranks in (1, 2)}


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
    (one,) = measured(recipe, 2, [16], tmp_path)
    (measurement,) = one.rounds
    assert all(s.samples <= 16 * s.steps for s in measurement.segments)
