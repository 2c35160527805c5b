"""A signal stops a run after its step, with a checkpoint; the resumed run is the uninterrupted one.

The second half does so through the command with --nproc: signals to the parent, and kills.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import pty
import random
import re
import signal
import sys
import termios
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from samestep.base import startup
from samestep.base.startup import stop_signals
from tests import tiny
from tests.command_line import one_message, start
from tests.faults import Fault
from tests.processes import Ranks, start_ranks
from tests.ranks.test_failure import started_by
from tests.training.stops import stop_all

TERM, USR1, INT, HUP = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP
SEED = int(os.environ.get("SAMESTEP_TEST_SEED", "20261121"))


@pytest.fixture
def recipe(tmp_path) -> Path:
    return tiny.write_recipe(tmp_path)


@pytest.mark.skipif(not startup._MAY_HANG, reason="this Python forks whatever its threads do")
def test_a_fork_waits_for_a_thread_of_pytorch_that_runs(monkeypatch):
    monkeypatch.setattr(startup, "_SETTLE_S", 60.0)

    def run():
        ctypes.CDLL(None).prctl(15, b"pt_runs", 0, 0, 0)  # PR_SET_NAME
        hashlib.sha256(bytes(100_000_000)).digest()

    threading.Thread(target=run).start()
    tiny.until(startup._threads_run)
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert not startup._threads_run()


def assert_stopped(run: Path, signum: int, printed: str) -> int:
    """Check what a run says that a signal stopped; return its step."""
    stop = tiny.all_records(run)[-1]
    assert (stop["event"], stop["reason"]) == ("stop", signal.Signals(signum).name)
    assert tiny.read_index(run)["last"]["step"] == stop["step"] == tiny.newest_announced(run)
    assert f" samestep train {run} --resume" in printed
    return stop["step"]


def num_evaluations(run: Path) -> int:
    return len([r for r in tiny.all_records(run) if r["event"] == "evaluation"])


def test_a_signal_saves_and_the_resumed_run_is_the_same_bit_by_bit(uninterrupted, recipe, tmp_path):
    draw, signums = random.Random(SEED), (TERM, HUP, USR1, USR1, USR1)
    nths = [draw.randint(1, 20) for _ in signums]
    print(f"seed {SEED}: after steps {nths} of the attempts")
    stops = [
        (Fault("after a step", nth, signum=signum), (recipe, "--run-dir", tmp_path / signum.name))
        for signum, nth in zip(signums, nths, strict=True)
    ]
    again = [(fault, (*words, "--resume")) for fault, words in stops]
    printed = stop_all(again, on=1, folder=tmp_path)
    for signum, step in zip((TERM, HUP, USR1), (*nths[:2], sum(nths[2:])), strict=True):
        run = tmp_path / signum.name
        assert assert_stopped(run, signum, printed) == step
        tiny.resumed(run)
        *_, found = (r for r in tiny.all_records(run) if r["event"] == "resume")
        assert found["step"] == step
        tiny.assert_same_training(run, uninterrupted, tolerance=0)


EVALUATION = Fault("before an evaluation", signum=TERM)
# Where the signal comes, and flags.
STOPS = {
    "at the end of an epoch": (replace(EVALUATION, nth=3), ()),
    "within an epoch": (replace(EVALUATION, nth=2), ("--eval-every-steps", "7")),
    "at the last step, within an epoch": (replace(EVALUATION, nth=6), ("--max-steps", "60")),
    "on the test set": (replace(EVALUATION, nth=7), ()),
    "while a checkpoint is named": (Fault("after the checkpoint's name", signum=TERM), ()),
    "while it is told": (Fault("within the record", signum=TERM), ()),
}


def test_a_signal_leaves_an_evaluation_to_the_resumed_run(uninterrupted, recipe, tmp_path):
    words = {w: (recipe, "--run-dir", tmp_path / w, *flags) for w, (_, flags) in STOPS.items()}
    printed = stop_all([(STOPS[w][0], words[w]) for w in STOPS], on=1, folder=tmp_path)
    for when, (fault, flags) in STOPS.items():
        run, whole = tmp_path / when, uninterrupted
        step = assert_stopped(run, TERM, printed)
        if fault.point == EVALUATION.point:
            assert num_evaluations(run) == fault.nth - 1, when
        else:  # a checkpoint is written while the next steps are taken
            assert step >= 5, when
        if flags:
            whole = tmp_path / f"whole, {when}"
            tiny.trained(recipe, whole, *flags)
        tiny.resumed(run)
        tiny.assert_same_training(run, whole, tolerance=0)


def test_two_ranks_that_a_signal_stops_together_go_on_with_the_same_bits(recipe, tmp_path):
    recipe.write_text(recipe.read_text().replace("nn.Tanh()", "nn.Tanh(), nn.Dropout(0.5)"))
    faults = {
        "one": Fault("after a step", 9, signum=TERM, rank=1),
        "index": Fault("within the index", signum=TERM),
        "test": replace(EVALUATION, nth=5),
    }
    tiny.set_pace(recipe, 0.02)
    runs = {name: tmp_path / name for name in faults}
    four = ("--epochs", "4")
    stops = [(fault, (recipe, *four, "--run-dir", runs[name])) for name, fault in faults.items()]
    printed = stop_all(stops, on=2, folder=tmp_path)
    for name, fault in faults.items():
        step = assert_stopped(runs[name], fault.signum, printed)
        if fault.point == "after a step":
            assert fault.nth <= step <= fault.nth + 26
        if fault.point == EVALUATION.point:
            assert num_evaluations(runs[name]) == fault.nth - 1
    tiny.set_pace(recipe, 0)
    whole = tmp_path / "whole"
    again = [[run, "--resume"] for run in runs.values()]
    tiny.train_all([[recipe, *four, "--run-dir", whole], *again], on=2, folder=tmp_path)
    for run in runs.values():
        tiny.assert_same_training(run, whole, tolerance=0)


def test_a_second_interrupt_ends_each_rank_at_once(recipe, tmp_path):
    run, fault = tmp_path / "run", Fault("after a step", 9, signum=INT, times=2, rank=None)
    tiny.struck(recipe, run, fault, on=2)
    assert [r["event"] for r in tiny.all_records(run)][-1] != "stop"
    assert tiny.newest_announced(run) in (4, 8)  # that of step 8 may still be written


def test_a_second_process_is_told_who_has_the_run(uninterrupted, recipe, tmp_path, refused):
    run = tmp_path / "run"
    tiny.set_pace(recipe, 0.05)
    first = tiny.start(recipe, "--run-dir", str(run), folder=tmp_path)
    tiny.until(lambda: tiny.num_records(run) > 3 and (run / "settings.toml").exists(), first)
    # Stopped it still has the run, however long the others take.
    os.kill(first.processes[0].pid, signal.SIGSTOP)
    holder = f" {first.processes[0].pid} "
    assert holder in refused("train", str(run), "--resume")
    second = tiny.start(run, "--resume", world_size=2, folder=tmp_path)
    assert second.wait() == [2, 2], second.output()
    assert holder in one_message(2, second.output())
    first.kill()
    first.wait()
    tiny.set_pace(recipe, 0)
    tiny.resumed(run)
    tiny.assert_same_training(run, uninterrupted)


def on_terminal(terminal: str, arguments: list[str]) -> None:
    from samestep.shell.cli import main

    opened = os.open(terminal, os.O_RDWR)
    fcntl.ioctl(opened, termios.TIOCSCTTY, 0)
    for usual in range(3):
        os.dup2(opened, usual)
    sys.exit(main(arguments))


def test_a_terminal_that_closes_stops_the_run_with_a_checkpoint(recipe, tmp_path):
    run = tmp_path / "run"
    tiny.set_pace(recipe, 0.02)
    ours, its = pty.openpty()
    words = ["train", str(recipe), "--run-dir", str(run)]
    process = start_ranks(on_terminal, 1, tmp_path / "output", os.ttyname(its), words)
    drain = threading.Thread(target=_read_all, args=(ours,), daemon=True)
    drain.start()
    tiny.until(lambda: tiny.num_records(run) >= 6, process)
    os.close(its)
    os.close(ours)  # whatever it prints from here on fails
    assert process.wait() == [128 + HUP]
    assert json.loads((run / "result.json").read_text())["reason"] == "SIGHUP"
    assert tiny.newest_announced(run) == tiny.all_records(run)[-1]["step"]


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


@contextlib.contextmanager
def command(recipe: Path, run: Path) -> Iterator[Ranks]:
    """Let `samestep train RECIPE --nproc 2` take steps; whatever a failed test leaves is ended."""
    words = ("train", str(recipe), "--run-dir", str(run), "--nproc", "2", "--max-steps", "2000")
    parent = start(*words, folder=run.parent / "output")
    index = run / "checkpoints" / "index.json"
    try:
        tiny.until(lambda: tiny.num_records(run) >= 6 and index.exists(), parent)
        yield parent
    finally:
        parent.kill()  # its ranks end with it


def assert_goes_on(recipe: Path, run: Path) -> None:
    """Go on with a run alone, and compare it with one that never stopped."""
    tiny.set_pace(recipe, 0)
    last, whole = str(tiny.newest_announced(run) + 20), run.with_name("whole")
    tiny.resumed(run, "--max-steps", last)
    tiny.trained(recipe, whole, "--max-steps", last)
    tiny.assert_same_training(run, whole)


# While it is slow: its children have to end by the SIGTERM that a rank would only note.
USES_A_POOL = """def data(options):
    if seconds:
        import multiprocessing
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(abs, range(64)) == list(range(64))
"""


@pytest.mark.slow
def test_a_signal_to_the_command_stops_all_its_ranks_with_a_checkpoint(recipe, tmp_path):
    """All signals go the same way; SIGINT is the one that a terminal sends to all."""
    run = tmp_path / "run"
    recipe.write_text(recipe.read_text().replace("def data(options):\n", USES_A_POOL))
    tiny.set_pace(recipe, 0.02)
    with command(recipe, run) as parent:
        pid = parent.processes[0].pid
        assert len(started_by(pid)) >= 2
        os.kill(pid, INT)
        assert parent.wait() == [128 + INT], parent.output()
    assert_stopped(run, INT, parent.output())
    assert "Traceback" not in parent.output()
    assert not started_by(pid)
    assert_goes_on(recipe, run)


@pytest.mark.slow
def test_killing_one_rank_of_the_command_ends_it_and_tells_of_it_once(recipe, tmp_path):
    run = tmp_path / "run"
    tiny.set_pace(recipe, 0.02)
    with command(recipe, run) as parent:
        pid = parent.processes[0].pid
        os.kill(min(started_by(pid, rank="1")), signal.SIGKILL)
        began = time.monotonic()
        assert parent.wait() == [1], parent.output()
    assert time.monotonic() - began < 300  # Gloo by itself would wait for half an hour
    printed = parent.output()
    assert printed.count("samestep: ") == 1
    assert re.search(r"Rank [01] .*SIGKILL", printed)
    assert "Traceback" not in printed
    assert not started_by(pid)
    assert_goes_on(recipe, run)
