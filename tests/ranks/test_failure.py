"""What a rank tells of its failure, and the values that it hands back even if it is killed."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from samestep.base import startup
from samestep.base.errors import UserError, known_remedy
from samestep.base.startup import JOB_RUN
from samestep.core.training.stopping import catch_signals
from samestep.launch.ranks import process
from samestep.launch.ranks.process import FAILURE, TASK, RankLog, hand_back, handed_back, report
from samestep.launch.ranks.start import _first_failure, _Stop
from tests.command_line import RECIPE, read_json, start, typed
from tests.processes import TIMEOUT_S
from tests.tiny import until, write_recipe

CODE = """
def outer(inner):
    inner()

def wrong():
    raise {error}

outer(wrong)
"""


@pytest.fixture(autouse=True)
def job(tmp_path, monkeypatch):
    """Give the run directory of a job that this process is a rank of; nobody is waited for."""
    monkeypatch.setattr(process, "GRACE_S", 0)
    monkeypatch.setenv(JOB_RUN, str(tmp_path))
    monkeypatch.delenv(process.PARENT, raising=False)
    return tmp_path


def error_of(text: str, file: str = "/home/ada/mine.py") -> Exception:
    try:
        exec(compile(CODE.format(error=text), file, "exec"), {"UserError": UserError})
    except Exception as error:
        return error.with_traceback(error.__traceback__.tb_next)  # without this function
    raise AssertionError


def test_an_error_is_told_with_the_users_lines_or_the_setting_to_change(capfd):
    assert report(error_of("KeyError('x')")) == 1
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("  at ")]
    places = [line.split(":")[1].partition(" in ")[::2] for line in said]
    assert places == [("6", "wrong"), ("3", "outer"), ("8", "<module>")]
    assert all("/home/ada/mine.py" in line for line in said)
    report(error_of("KeyError('x')", "/v/lib/python3.12/site-packages/torch/x.py"))
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("  at ")]
    assert [line.split(" in ")[0] for line in said] == [
        "  at /v/lib/python3.12/site-packages/torch/x.py:6"
    ]
    error = RuntimeError(
        "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv"
    )
    assert report(error) == 1
    assert "--timeout-s" in capfd.readouterr().err
    assert "--strategy ddp" in known_remedy(RuntimeError("setStorage: sizes [3], strides [1]"))
    assert "nodesplitter=None" in known_remedy(ValueError("you need an explicit nodesplitter"))


@pytest.mark.parametrize(
    ("text", "code", "lost"),
    [
        ("KeyError('x')", 1, False),
        ("UserError('There is no file.')", 2, False),
        ("RuntimeError('Connection reset by peer')", 1, True),
    ],
)
def test_a_rank_leaves_what_it_says_for_the_job(job, text, code, lost):
    log = RankLog(0)
    log.rank = 3
    report(error_of(text), log)
    left = json.loads((job / FAILURE.format(rank=3)).read_text())
    assert (left["rank"], left["code"], left["lost_peer"]) == (3, code, lost)
    assert left["time"] > 0
    assert left["message"]


def test_what_all_agreed_on_is_left_by_no_rank(job):
    log = RankLog(0)
    log.rank = 3
    report(UserError("no", on_all_ranks=True), log)
    assert list(job.iterdir()) == []


# How ranks ended: exit code and what they left of an error; then the command's code and words.
ENDS = [
    ({1: (3, "")}, 1, "Rank 1 ended with exit code 3 ", "rank-1.log of the run directory."),
    ({0: (-signal.SIGTERM, ""), 1: (2, "")}, 2, "Rank 1 ended with exit code 2 "),
    ({0: (-signal.SIGKILL, "")}, 1, "Rank 0 was killed by SIGKILL (out of memory?); "),
    ({0: (3, "")}, 1, "rank-0.log of the run directory, or above."),
    ({1: (1, "KeyError: 'x'")}, 1, "[rank 1] KeyError: 'x'"),
    ({1: (2, "There is no file.")}, 2, "There is no file."),
    ({0: (128 + signal.SIGUSR1, "")}, 128 + signal.SIGUSR1),
    ({0: (1, "Rank 0 lost contact with another rank: reset")}, 1, "Rank 1 ended with exit code 0 "),
]


@pytest.mark.parametrize(("ends", "code", "said"), [(*end[:2], end[2:]) for end in ENDS])
def test_the_command_ends_as_the_rank_that_failed_first(tmp_path, ends, code, said):
    failures = {}
    for rank, (exitcode, message) in ends.items():
        told = {"message": message, "errorCode": exitcode, "extraInfo": {"timestamp": 1}}
        file = tmp_path / f"{rank}.json"
        file.write_text(json.dumps({"message": told})) if message else None
        failures[rank] = ProcessFailure(rank, 1, exitcode, str(file))
    ended = _first_failure(ChildFailedError("samestep", failures), 2)
    assert ended.code == code
    assert all(words in ended.message for words in said)
    assert bool(ended.message) == bool(said)


def fail_after(signum: int, error: Exception) -> int:
    """Return the exit code of a training that fails after it got a signal, 0 for none."""
    try:
        with catch_signals():
            if signum:
                os.kill(os.getpid(), signum)
            raise error
    except type(error) as raised:
        return report(raised)


RESET = RuntimeError("Connection reset by peer")


@pytest.mark.parametrize(
    ("signum", "error", "told"),
    [
        (0, RESET, 1),
        (signal.SIGUSR1, RESET, 1),
        (signal.SIGTERM, RESET, 0),
        (signal.SIGTERM, KeyError("x"), 1),  # it fails by itself, although it was to stop
    ],
)
def test_a_rank_that_its_launcher_ends_says_nothing(monkeypatch, capfd, signum, error, told):
    monkeypatch.setattr(startup, "_held", [])
    assert fail_after(signum, error) == 1
    assert capfd.readouterr().err.count("samestep: ") == told


def test_values_come_in_order_without_one_that_was_cut_short(tmp_path, monkeypatch):
    task = tmp_path / "task"
    monkeypatch.setenv(TASK, str(task))
    assert handed_back(task, 0) == []
    hand_back({"loss": 0.5})
    hand_back(["a", "b"])
    assert handed_back(task, 0) == [{"loss": 0.5}, ["a", "b"]]
    assert handed_back(task, 1) == []
    (file,) = tmp_path.glob("task*")
    file.write_bytes(file.read_bytes()[:-3])
    assert handed_back(task, 0) == [{"loss": 0.5}]


SEED = int(os.environ.get("SAMESTEP_TEST_SEED", "20261122"))
MOMENTS, WITHIN_S = 4, 60.0


def started_by(parent: int, *, rank: str = "") -> list[int]:
    """Return the processes that a command has started as its ranks, or one, and that still run."""
    wanted = {f"SAMESTEP_PARENT={parent}".encode(), *([f"RANK={rank}".encode()] if rank else [])}
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            state = (path.parent / "stat").read_text().rpartition(")")[2].split()[0]
            if wanted <= set(path.read_bytes().split(b"\0")):
                found += [int(path.parent.name)] * (state != "Z")
    return found


def test_a_rank_whose_launcher_is_gone_ends_at_once_but_no_command_of_a_rank(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    words = ("-X", "importtime", "-m", "samestep", "train", "spiral")
    done = typed(*words, folder=tmp_path, SAMESTEP_PARENT=str(gone.pid))
    assert done.returncode == 1
    assert "samestep.base.startup" in done.stderr
    assert "samestep.shell.cli" not in done.stderr
    more = {"SAMESTEP_PARENT": "1", "SAMESTEP_RANK_PROCESS": str(os.getpid())}
    done = typed("-m", "samestep", "--version", folder=tmp_path, **more)
    assert done.returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_after_a_kill_of_the_command_at_any_moment_no_rank_and_no_folder_is_left(tmp_path):
    place = {"TMPDIR": str(tmp_path)}
    recipe = write_recipe(tmp_path)
    draw = random.Random(SEED)
    print(f"seed {SEED}")
    for moment in range(MOMENTS):
        arguments = ("train", str(recipe), "--nproc", "2", "--run-dir", str(tmp_path / f"{moment}"))
        command = start(*arguments, folder=tmp_path / f"output-{moment}", environment=place)
        pid = command.processes[0].pid
        assert pid is not None
        until(lambda pid=pid: bool(started_by(pid)), command)
        time.sleep(draw.uniform(0, 4 * moment / MOMENTS))  # from the first fork to training
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        command.wait()
        until(lambda pid=pid: not started_by(pid))
        until(lambda: not [*tmp_path.glob("samestep-*")])
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


LATE = (
    RECIPE
    + """
import os, signal, time
from samestep.base.run.directory import Run
write = Run.write_result
def write_late(run, result):
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(0.5)
    write(run, result)
Run.write_result = write_late
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--elastic",)])
def test_a_stop_after_the_last_step_leaves_a_training_complete(tmp_path, flags):
    (tmp_path / "late.py").write_text(LATE)
    words = ("train", "late.py", "--nproc", "2", "--run-dir", "run", *flags)
    assert typed("-m", "samestep", *words, folder=tmp_path).returncode == 0
    assert read_json(tmp_path / "run" / "result.json")["status"] == "completed"


def test_a_stop_that_code_on_its_way_drops_is_asked_for_at_the_next_look_at_the_ranks():
    stop = _Stop()
    with contextlib.suppress(SignalException):
        stop.heed(signal.SIGTERM, None)
    with pytest.raises(SignalException):
        stop.monitored(lambda _agent: None, object())
    stop.heed(signal.SIGUSR1, None)  # it must not raise where something may drop it


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_what_ranks_have_left_ends_and_what_runs_beside_them_does_not():
    from samestep.base.startup import end_leftovers

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
