"""What a rank tells of its failure, and the values that it hands back even if it is killed."""

import json
import os
import signal

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from samestep.errors import UserError
from samestep.ranks import process, startup
from samestep.ranks.process import FAILURE, TASK, RankLog, hand_back, handed_back, report
from samestep.ranks.start import _first_failure
from samestep.ranks.startup import JOB_RUN
from samestep.training.stopping import catch_signals

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


def test_an_error_is_told_with_all_lines_of_the_users_or_else_where_it_arose(capfd):
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


def test_what_all_agreed_on_is_left_once_and_a_rank_that_ends_silently_is_named(job):
    log = RankLog(0)
    log.rank = 3
    report(UserError("no", on_all_ranks=True), log)
    assert list(job.iterdir()) == []
    left = ProcessFailure(local_rank=1, pid=1, exitcode=3, error_file="none.json")
    ended = _first_failure(ChildFailedError("samestep", {1: left}))
    assert ended.code == 1
    assert "Rank 1 ended with exit code 3 " in ended.message
    assert "rank-1.log" in ended.message


def test_a_rank_that_waited_too_long_names_the_setting(capfd):
    error = RuntimeError(
        "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv"
    )
    assert report(error) == 1
    assert "--timeout-s" in capfd.readouterr().err


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
