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

from tests.command_line import start, typed
from tests.processes import TIMEOUT_S
from tests.tiny import until, write_recipe

SEED = int(os.environ.get("SAMESTEP_TEST_SEED", "20261122"))
MOMENTS, WITHIN_S = 4, 60.0


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
    words = ("-X", "importtime", "-m", "samestep", "train", "spiral")
    done = typed(*words, folder=tmp_path, SAMESTEP_PARENT=str(gone.pid))
    assert done.returncode == 1
    assert "samestep.ranks.startup" in done.stderr
    assert "samestep.cli" not in done.stderr


def test_a_command_that_a_rank_starts_is_no_rank(tmp_path):
    more = {"SAMESTEP_PARENT": "1", "SAMESTEP_RANK_PROCESS": str(os.getpid())}
    done = typed("-m", "samestep", "--version", folder=tmp_path, **more)
    assert done.returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_after_a_kill_of_the_command_at_any_moment_no_rank_is_left(tmp_path):
    recipe = write_recipe(tmp_path)
    draw = random.Random(SEED)
    print(f"seed {SEED}")
    for moment in range(MOMENTS):
        arguments = ("train", str(recipe), "--nproc", "2", "--run-dir", str(tmp_path / f"{moment}"))
        command = start(*arguments, folder=tmp_path / f"output-{moment}")
        pid = command.processes[0].pid
        assert pid is not None
        until(lambda pid=pid: bool(started_by(pid)), command)
        time.sleep(draw.uniform(0, 4 * moment / MOMENTS))  # from the first fork to training
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        command.wait()
        until(lambda pid=pid: not started_by(pid))
        assert time.monotonic() - killed < WITHIN_S, moment


# Children that do not heed SIGTERM, of a rank that hangs while it reads its data.
STUBBORN = """
import multiprocessing, os, signal, time
from pathlib import Path
from samestep import Recipe

def sleep(folder):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(folder, str(os.getpid())).touch()
    time.sleep(600)

def data():
    for method in ("fork", "forkserver", "spawn"):
        child = multiprocessing.get_context(method).Process(target=sleep, args=(FOLDER,))
        child.start()
    time.sleep(600)

recipe = Recipe(model=data, data=data)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM], ids=lambda s: s.name)
def test_sigkill_or_a_second_sigterm_of_the_command_leaves_no_child_of_a_rank(tmp_path, signum):
    pids = tmp_path / "pids"
    pids.mkdir()
    recipe = write_recipe(tmp_path, STUBBORN.replace("FOLDER", repr(str(pids))))
    command = start("train", str(recipe), "--nproc", "2", folder=tmp_path / "output")
    parent = command.processes[0].pid
    assert parent is not None
    until(lambda: len(list(pids.iterdir())) == 6, command)
    while command.processes[0].exitcode is None:
        os.kill(parent, signum)
        command.processes[0].join(1.1)
    until(lambda: not [p for p in pids.iterdir() if Path("/proc", p.name, "fd").exists()])
    assert not started_by(parent)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_what_ranks_have_left_ends_and_what_runs_beside_them_does_not():
    from samestep.ranks.startup import end_leftovers

    environment = {**os.environ, "SAMESTEP_PARENT": str(os.getpid())}
    sleeper = (sys.executable, "-c", "import time; time.sleep(600)")
    theirs = subprocess.Popen(sleeper, env=environment, start_new_session=True)
    beside = subprocess.Popen(sleeper, env=environment)
    until(lambda: set(started_by(os.getpid())) == {theirs.pid, beside.pid})
    end_leftovers(os.getpid())
    assert theirs.wait(TIMEOUT_S) == -signal.SIGKILL
    assert beside.poll() is None
    beside.kill()
    beside.wait()
