"""A signal stops a run after its step, with a checkpoint; the resumed run is the uninterrupted one.

The second half does so through the real command with --nproc: signals to the parent, and kills.
"""

import contextlib
import json
import os
import pty
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from samestep.ranks.startup import stop_signals
from tests.faults import Fault
from tests.processes import TIMEOUT_S
from tests.tiny import (
    STEPS,
    all_records,
    assert_same_training,
    newest_announced,
    num_records,
    read_index,
    resumed,
    set_pace,
    start,
    struck,
    trained,
    until,
    write_recipe,
)

TERM, USR1, INT, HUP = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP
SEED = int(os.environ.get("SAMESTEP_TEST_SEED", "20261121"))


@pytest.fixture
def recipe(tmp_path) -> Path:
    return write_recipe(tmp_path)


def assert_stopped(run: Path, signum: int, printed: str) -> int:
    """Check what a run says that a signal stopped; return its step."""
    stop = all_records(run)[-1]
    assert (stop["event"], stop["reason"]) == ("stop", signal.Signals(signum).name)
    assert read_index(run)["last"]["step"] == stop["step"] == newest_announced(run)
    assert f" samestep train {run} --resume" in printed
    return stop["step"]


@pytest.mark.parametrize(
    ("world_size", "signum", "rank"), [(1, TERM, 0), (1, HUP, 0), (2, TERM, 1), (2, USR1, None)]
)
def test_a_signal_ends_the_step_saves_and_the_resumed_run_is_the_same_bit_by_bit(
    uninterrupted, uninterrupted_on_two, recipe, tmp_path, world_size, signum, rank
):
    nth = random.Random(f"{SEED}-{world_size}-{signum}").randint(1, 20)
    print(f"seed {SEED}: {signum} to rank {rank} after step {nth}")
    run = tmp_path / "run"
    set_pace(recipe, 0.02)  # several ranks agree twice a second: after 25 steps at most
    fault = Fault("after a step", nth, signum=signum, rank=rank)
    ranks = struck(recipe, run, fault, on=world_size)
    step = assert_stopped(run, signum, ranks.printed(0))
    # One process acts after the very step; several at the next step that they agreed to meet at.
    assert step == nth if world_size == 1 else nth <= step <= nth + 26
    set_pace(recipe, 0)
    resumed(run, on=world_size)
    (found,) = (r for r in all_records(run) if r["event"] == "resume")
    assert found["step"] == step
    whole = uninterrupted if world_size == 1 else uninterrupted_on_two
    assert_same_training(run, whole, tolerance=0)


@pytest.mark.parametrize(
    ("point", "world_size"),
    [
        ("before an evaluation", 2),
        ("after the checkpoint's name", 1),
        ("within the index", 2),
        ("within the record", 1),
    ],
)
def test_a_signal_during_a_checkpoint_lets_it_finish_and_leaves_an_evaluation(
    uninterrupted, recipe, tmp_path, world_size, point
):
    run = tmp_path / "run"
    set_pace(recipe, 0.02)
    ranks = struck(recipe, run, Fault(point, 1, signum=TERM), on=world_size)
    step = assert_stopped(run, TERM, ranks.printed(0))
    if world_size == 1:
        # A checkpoint is written while the next steps are taken.
        assert step == 11 if point == "before an evaluation" else step >= 5
    set_pace(recipe, 0)
    resumed(run)
    assert_same_training(run, uninterrupted)


# The epoch's end, within an epoch, at the last step of all, and on the test set.
EVALUATIONS = {
    "at the end of an epoch": (3, ()),
    "at the very end": (6, ()),
    "within an epoch": (2, ("--eval-every-steps", "7")),
    "at the last step, within an epoch": (6, ("--max-steps", "60")),
    "of the test set": (7, ()),
}


@pytest.mark.parametrize(
    ("when", "world_size"),
    [*((when, 1) for when in EVALUATIONS), ("at the end of an epoch", 2), ("of the test set", 2)],
)
def test_a_signal_leaves_an_evaluation_which_the_resumed_run_does(
    uninterrupted, uninterrupted_on_two, recipe, tmp_path, when, world_size
):
    number, flags = EVALUATIONS[when]
    whole, run = uninterrupted if world_size == 1 else uninterrupted_on_two, tmp_path / "run"
    if flags:
        whole = tmp_path / "whole"
        trained(recipe, whole, *flags, on=world_size)
    fault = Fault("before an evaluation", number, signum=TERM)
    ranks = struck(recipe, run, fault, *flags, on=world_size)
    done = [r for r in all_records(run) if r["event"] == "evaluation"]
    assert len(done) == number - 1
    assert_stopped(run, TERM, ranks.printed(0))
    resumed(run, on=world_size)
    assert_same_training(run, whole, tolerance=0)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_second_interrupt_ends_the_rank_at_once(recipe, tmp_path, world_size):
    run = tmp_path / "run"
    fault = Fault("after a step", 9, signum=INT, times=2, rank=None)
    struck(recipe, run, fault, on=world_size)
    assert [r["event"] for r in all_records(run)][-1] != "stop"
    assert newest_announced(run) in (4, 8)  # that of step 8 may still be written


def test_stopping_again_and_again_is_the_same_run(uninterrupted, recipe, tmp_path):
    run, draw = tmp_path / "run", random.Random(SEED)
    for _ in range(3):
        nth = draw.randint(1, 12)
        print(f"seed {SEED}: after step {nth} of this attempt")
        fault = Fault("after a step", nth, signum=USR1)
        struck(recipe, run, fault, "--resume")
    resumed(run)
    assert_same_training(run, uninterrupted, tolerance=0)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_second_process_that_resumes_the_same_run_is_told_who_has_it(
    uninterrupted, recipe, tmp_path, world_size
):
    run = tmp_path / "run"
    set_pace(recipe, 0.05)
    first = start(recipe, "--run-dir", str(run), folder=tmp_path)
    until(lambda: num_records(run) > 3 and (run / "settings.toml").exists(), first)
    second = start(run, "--resume", world_size=world_size, folder=tmp_path)
    assert second.wait() == [2] * world_size, second.output()
    assert f" {first.processes[0].pid} " in second.printed(0)
    assert second.printed(0).count("samestep: ") == 1
    first.kill()
    first.wait()
    set_pace(recipe, 0)
    resumed(run)
    assert_same_training(run, uninterrupted)


# Through the real command.


def start_command(recipe: Path, run: Path) -> subprocess.Popen[str]:
    """Start `python -m samestep train RECIPE --nproc 2` as a user does, and let it take steps."""
    parent = subprocess.Popen(
        [
            *(sys.executable, "-m", "samestep", "train", str(recipe), "--run-dir", str(run)),
            *("--nproc", "2", "--max-steps", "2000"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    index = run / "checkpoints" / "index.json"
    until(lambda: parent.poll() is not None or (num_records(run) >= 6 and index.exists()))
    assert parent.poll() is None, parent.communicate()[0]
    return parent


@contextlib.contextmanager
def command(recipe: Path, run: Path):
    """End whatever a failed test leaves of the command, by its process group."""
    parent = start_command(recipe, run)
    try:
        yield parent
    finally:
        for pid in [*children(parent.pid), parent.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        parent.communicate()


def children(pid: int) -> list[int]:
    """Return the processes that one has started and that still run, in the order of their ids."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, ppid = path.read_text().rpartition(")")[2].split()[:2]
            if int(ppid) == pid and state != "Z":
                found.append(int(path.parent.name))
    return sorted(found)


def runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def rank_pids(parent: int) -> dict[int, int]:
    found = {}
    for pid in children(parent):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        found |= {int(v.partition(b"=")[2]): pid for v in variables if v.startswith(b"RANK=")}
    assert sorted(found) == [0, 1]
    return found


# Its children have to end by the SIGTERM that a rank would only note.
USES_A_POOL = """def data(options):
    import multiprocessing
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(abs, range(64)) == list(range(64))
"""


def test_a_signal_to_the_command_stops_all_its_ranks_with_a_checkpoint(
    uninterrupted_on_two, recipe, tmp_path
):
    """All signals go the same way; SIGINT is the one that a terminal sends to all."""
    run, signum = tmp_path / "run", INT
    recipe.write_text(recipe.read_text().replace("def data(options):\n", USES_A_POOL))
    set_pace(recipe, 0.02)
    with command(recipe, run) as parent:
        ranks = rank_pids(parent.pid)
        parent.send_signal(signum)
        printed = parent.communicate(timeout=TIMEOUT_S)[0]
    assert parent.returncode == 128 + signum, printed
    step = assert_stopped(run, signum, printed)
    assert "Traceback" not in printed
    assert not [pid for pid in ranks.values() if runs(pid)]
    set_pace(recipe, 0)
    resumed(run, "--max-steps", str(max(step, STEPS)), on=2)
    assert step <= STEPS
    assert_same_training(run, uninterrupted_on_two, tolerance=0)


def test_a_terminal_that_closes_stops_the_run_with_a_checkpoint(recipe, tmp_path):
    run = tmp_path / "run"
    set_pace(recipe, 0.02)
    ours, its = pty.openpty()
    command = [sys.executable, "-m", "samestep", "train", str(recipe), "--run-dir", str(run)]
    process = subprocess.Popen(
        ["setsid", "--ctty", "--wait", *command], stdin=its, stdout=its, stderr=its
    )
    os.close(its)
    drain = threading.Thread(target=_read_all, args=(ours,), daemon=True)
    drain.start()
    until(lambda: process.poll() is not None or num_records(run) >= 6)
    os.close(ours)  # whatever it prints from here on fails
    process.wait(TIMEOUT_S)
    assert json.loads((run / "result.json").read_text())["reason"] == "SIGHUP"
    assert newest_announced(run) == all_records(run)[-1]["step"]


def _read_all(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(descriptor, 4096):
            pass


def test_where_sighup_is_ignored_as_under_nohup_it_stays_ignored():
    before = signal.signal(HUP, signal.SIG_IGN)
    try:
        assert HUP not in stop_signals()
    finally:
        signal.signal(HUP, before)
    assert HUP in stop_signals()


def test_killing_one_rank_of_the_command_ends_it_and_tells_of_it_once(
    uninterrupted, recipe, tmp_path
):
    run, killed = tmp_path / "run", 1
    set_pace(recipe, 0.02)
    with command(recipe, run) as parent:
        ranks = rank_pids(parent.pid)
        os.kill(ranks[killed], signal.SIGKILL)
        began = time.monotonic()
        printed = parent.communicate(timeout=TIMEOUT_S)[0]
        took = time.monotonic() - began
    assert parent.returncode == 1, printed
    assert took < 300  # Gloo by itself would wait for half an hour
    assert printed.count("samestep: ") == 1
    assert f"Rank {killed} " in printed
    assert "SIGKILL" in printed
    assert "Traceback" not in printed
    assert not [pid for pid in ranks.values() if runs(pid)]
    set_pace(recipe, 0)
    resumed(run, "--max-steps", str(STEPS))
    assert_same_training(run, uninterrupted)
