"""A rank's life is tied to its launcher's: SIGKILL of the command leaves nothing behind."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import TIMEOUT_S, start_samestep
from tests.tiny import until, write_recipe

SEED = int(os.environ.get("SAMESTEP_TEST_SEED", "20261122"))
MOMENTS, WITHIN_S = 20, 10.0


def started_by(parent: int) -> list[int]:
    """Return the processes that a command has started as its ranks and that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            state = (path.parent / "stat").read_text().rpartition(")")[2].split()[0]
            if f"SAMESTEP_PARENT={parent}".encode() in path.read_bytes().split(b"\0"):
                found += [int(path.parent.name)] * (state != "Z")
    return found


def test_a_rank_whose_launcher_is_gone_ends_before_it_imports_anything(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "samestep", "train", "spiral"],
        env={**os.environ, "SAMESTEP_PARENT": str(gone.pid)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 1
    assert "samestep.ranks.startup" in done.stderr
    assert "samestep.cli" not in done.stderr


def test_a_command_that_a_rank_starts_is_no_rank(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "samestep", "--version"],
        env={**os.environ, "SAMESTEP_PARENT": "1", "SAMESTEP_RANK_PROCESS": str(os.getpid())},
        cwd=tmp_path,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_after_a_kill_of_the_command_at_any_moment_no_rank_is_left(tmp_path):
    recipe = write_recipe(tmp_path)
    draw = random.Random(SEED)
    print(f"seed {SEED}")
    for moment in range(MOMENTS):
        arguments = ("train", str(recipe), "--nproc", "3", "--run-dir", str(tmp_path / f"{moment}"))
        command = start_samestep(*arguments, folder=tmp_path / f"output-{moment}")
        pid = command.processes[0].pid
        assert pid is not None
        until(lambda pid=pid: bool(started_by(pid)), command)
        time.sleep(draw.uniform(0, 4 * moment / MOMENTS))  # from the first fork to training
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        command.wait()
        until(lambda pid=pid: not started_by(pid))
        assert time.monotonic() - killed < WITHIN_S, moment
