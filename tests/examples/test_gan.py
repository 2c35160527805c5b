"""The GAN: two optimizers in one loop, the same on any number of ranks, killed and resumed."""

import signal
from pathlib import Path

import pytest

from tests.processes import TIMEOUT_S
from tests.session.same import account, assert_same
from tests.session.scripts import EXAMPLES, Strike, run, start
from tests.tiny import all_records, newest_announced

SCRIPT = EXAMPLES / "gan.py"
FLAGS = ("run", "--points", "271", "--epochs", "4", "--checkpoint-every-steps", "2")
STEPS = 12  # 100, 100 and 71 points an epoch


def whole(folder: Path, world_size: int) -> Path:
    run(SCRIPT, *FLAGS, world_size=world_size, folder=folder)
    return folder / "run"


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """The run of a single process."""
    return whole(tmp_path_factory.mktemp("alone"), 1)


@pytest.fixture(scope="module")
def on_two(tmp_path_factory) -> Path:
    """The run of two ranks."""
    return whole(tmp_path_factory.mktemp("two"), 2)


def test_both_losses_are_the_same_on_one_two_and_three_ranks(alone, on_two, tmp_path):
    assert_same(on_two, alone)
    assert_same(whole(tmp_path, 3), alone)
    assert all({"loss", "g_loss"} <= record.keys() for record in account(alone))


@pytest.mark.parametrize(("world_size", "then"), [(1, 1), (2, 3)])
def test_a_killed_run_goes_on_from_the_exact_step(alone, on_two, tmp_path, world_size, then):
    ranks = start(
        *(SCRIPT, *FLAGS), world_size=world_size, folder=tmp_path, strike=Strike(8, signal.SIGKILL)
    )
    ranks.processes[0].join(TIMEOUT_S)
    assert ranks.processes[0].exitcode == -signal.SIGKILL, ranks.output()
    ranks.kill()
    ranks.wait()
    announced = newest_announced(tmp_path / "run")
    assert 4 <= announced <= 7  # what a thread was still writing is lost: at most one
    run(SCRIPT, *FLAGS, world_size=then, folder=tmp_path)
    (resumed,) = (r for r in all_records(tmp_path / "run") if r["event"] == "resume")
    assert resumed["step"] == announced
    reference = alone if world_size == 1 else on_two
    assert_same(tmp_path / "run", reference, tolerance=0 if then == world_size else 1e-9)


@pytest.mark.parametrize(("signum", "rank"), [(signal.SIGTERM, 1), (signal.SIGINT, 0)])
def test_a_signal_to_one_rank_stops_all_with_a_checkpoint(on_two, tmp_path, signum, rank):
    strike = Strike(2, signum, rank)
    run(SCRIPT, *FLAGS, world_size=2, folder=tmp_path, strike=strike, code=128 + signum)
    stop = all_records(tmp_path / "run")[-1]
    assert (stop["event"], stop["reason"]) == ("stop", signal.Signals(signum).name)
    assert 2 <= stop["step"] == newest_announced(tmp_path / "run")
    run(SCRIPT, *FLAGS, world_size=2, folder=tmp_path)
    assert_same(tmp_path / "run", on_two, tolerance=0)
