"""One measurement on real ranks: what it leaves, and that the phase to blame is the right one."""

from pathlib import Path

import pytest

from samestep.profiling.scaling_study import MeasuredSetup, Setup, read_measurement
from samestep.profiling.speed_up import reasons, scaling_of
from samestep.run.records import read_records
from tests.processes import run_ranks
from tests.tiny import RECIPE, write_recipe

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


def test_it_leaves_segments_whose_steps_samples_and_seconds_are_the_loops(found):
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


def test_a_rank_that_is_slow_shows_as_waiting_for_it(found):
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
