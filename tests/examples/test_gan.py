"""The GAN: two optimizers in one loop, the same on any number of ranks, killed and resumed."""

import signal
from pathlib import Path

import pytest

from tests.processes import TIMEOUT_S
from tests.session.same import account, assert_same
from tests.session.scripts import EXAMPLES, Strike, run, start
from tests.tiny import all_records, newest_announced

SCRIPT = EXAMPLES / "gan.py"
GAN_FLAGS = ("run", "--points", "271", "--epochs", "4", "--checkpoint-every-steps", "2")


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """The run of a single process: 12 steps, of 100, 100 and 71 points an epoch."""
    folder = tmp_path_factory.mktemp("alone")
    run(SCRIPT, *GAN_FLAGS, folder=folder)
    return folder / "run"


def test_killed_on_two_ranks_it_goes_on_from_the_exact_step_on_three_with_both(alone, tmp_path):
    strike = Strike(8, signal.SIGKILL)
    ranks = start(SCRIPT, *GAN_FLAGS, world_size=2, folder=tmp_path, strike=strike)
    ranks.processes[0].join(TIMEOUT_S)
    assert ranks.processes[0].exitcode == -signal.SIGKILL, ranks.output()
    ranks.kill()
    ranks.wait()
    announced = newest_announced(tmp_path / "run")
    assert 4 <= announced <= 7  # what a thread was still writing is lost: at most one
    run(SCRIPT, *GAN_FLAGS, world_size=3, folder=tmp_path)
    (resumed,) = (r for r in all_records(tmp_path / "run") if r["event"] == "resume")
    assert resumed["step"] == announced
    assert_same(tmp_path / "run", alone)
    assert all({"loss", "g_loss"} <= record.keys() for record in account(alone))
