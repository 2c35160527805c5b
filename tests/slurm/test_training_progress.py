"""A job as scontrol shows it, and how far its run has come by the files in its directory."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from samestep.base.table import text_lines
from samestep.cluster.slurm.queue import JobAndRun, Progress, parse_job, read_progress
from samestep.shell.commands.slurm import logs
from samestep.shell.commands.slurm.status import jobs_table

START = {"event": "start", "resumed": False, "world_size": 1, "num_samples": 80}
START |= {"total_steps": 100, "steps_per_epoch": 10, "epochs": 10, "global_batch_size": 8}
AGAIN = {**START, "resumed": True}


def step(number: int, loss: float = 0.5) -> dict:
    seen = {"samples": 8 * number, "seconds": 1.0, "samples_per_s": 16.0}
    return {"event": "step", "step": number, "epoch": 1, "loss": loss} | seen


def saved(number: int) -> dict:
    return {"event": "checkpoint", "step": number, "path": f"checkpoints/{number}.pt"}


def resumed(number: int) -> dict:
    return {"event": "resume", "step": number, "checkpoint": f"{number}.pt"}


@pytest.fixture
def write(tmp_path):
    def _write(*records: dict, result: str | None = None, torn: str = "") -> Progress | None:
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (tmp_path / "events.jsonl").write_text(lines + torn)
        if result is not None:
            (tmp_path / "result.json").write_text(result)
        return read_progress(tmp_path)

    return _write


def test_a_running_training_tells_its_step_epoch_loss_and_what_is_left(write):
    progress = write(START, step(10), saved(10), step(20, loss=0.25), torn='{"event": "st')
    found = {"step": 20, "total_steps": 100, "epoch": 3, "epochs": 10, "loss": 0.25}
    assert progress == Progress(**found, checkpoint_step=10, eta_s=80 * 8 / 16.0, starts=1)
    assert write(START, step(100)).epoch == 10
    assert write(START | {"epochs": None}, step(100)).epoch == 11


def test_a_training_that_has_not_begun_has_no_loss_but_the_reason_of_its_failure(tmp_path, write):
    assert read_progress(tmp_path) is None
    assert write() is None
    progress = write(START)
    assert (progress.step, progress.epoch, progress.starts) == (0, 1, 1)
    assert (progress.loss, progress.eta_s, progress.checkpoint_step) == (None, None, None)
    (tmp_path / "events.jsonl").unlink()
    table = {"status": "failed", "reason": "failed: no such data"}
    (tmp_path / "result.json").write_text(json.dumps(table))
    assert read_progress(tmp_path) == Progress(status="failed", why="failed: no such data")


def test_a_resumed_training_stands_at_its_checkpoint_and_an_ended_one_says_how(write):
    killed = (START, step(10), saved(10), step(20))
    progress = write(*killed, AGAIN, resumed(10))
    assert (progress.step, progress.checkpoint_step, progress.starts) == (10, 10, 2)
    stop = {"event": "stop", "step": None, "reason": "failed: no disk"}  # at no step of its own
    progress = write(*killed, stop, AGAIN, resumed(10), step(15))
    assert (progress.step, progress.starts) == (15, 2)
    stop = {"event": "stop", "step": 10, "reason": "SIGUSR1"}
    ended = write(START, step(10), saved(10), stop, result=STOPPED)
    assert (ended.status, ended.why) == ("stopped", "SIGUSR1")
    on = write(START, step(10), saved(10), stop, AGAIN, resumed(10), step(20), result=STOPPED)
    assert on.status == ""


STOPPED = json.dumps({"status": "stopped", "reason": "SIGUSR1"})


@pytest.mark.parametrize("line", ["{torn", '{"event": "start"}', "\\xff"])
def test_a_damaged_line_inside_the_records_is_told_and_no_traceback(tmp_path, line):
    text = f"{json.dumps(START)}\n{line}\n{json.dumps(step(10))}\n"
    (tmp_path / "events.jsonl").write_bytes(text.encode("latin-1"))
    (tmp_path / "result.json").write_text(json.dumps({"status": "failed", "reason": "no disk"}))
    progress = read_progress(tmp_path)
    assert str(tmp_path / "events.jsonl") in progress.damage
    assert (progress.status, progress.why) == ("failed", "no disk")


@pytest.mark.parametrize("result", ["", "{", "[1]", "null", "\x00"])
def test_a_result_that_cannot_be_read_is_left_aside(write, result):
    stop = {"event": "stop", "step": 10, "reason": "finished"}
    progress = write(START, step(10), stop, result=result)
    assert (progress.step, progress.status, progress.why) == (10, "completed", "finished")
    assert "result.json" in progress.damage


_HEAD = (
    "UserId=ada(1000) GroupId=ada(1000) MCS_label=N/A Priority=4294901740 Nice=0 Account=(null) "
    "QOS=(null) "
)
PENDING = (
    "JobId=7 JobName=spiral " + _HEAD + "JobState=PENDING Reason=Dependency "
    "Dependency=afterok:6(unfulfilled) Requeue=1 Restarts=0 ExitCode=0:0 RunTime=00:00:00 "
    "TimeLimit=UNLIMITED StartTime=Unknown ReqNodeList=node9 ExcNodeList=node8 NodeList= "
    "NumNodes=1 Comment=samestep:/home/ada/runs/a StdOut=/home/ada/runs/a/slurm-7.out Power= "
)
RUNNING = (
    "JobId=19 JobName=my first job " + _HEAD + "JobState=RUNNING Reason=None Dependency=(null) "
    "Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=0:0 RunTime=1-02:03:04 "
    "TimeLimit=2-00:00:00 TimeMin=N/A "
    "StartTime=2026-11-21T14:46:53 EndTime=2026-11-23T14:46:53 Deadline=N/A "
    "Partition=debug AllocNode:Sid=login:23478 ReqNodeList=(null) ExcNodeList=(null) "
    "NodeList=node[1-2] BatchHost=node1 "
    "NumNodes=1 NumCPUs=1 NumTasks=1 CPUs/Task=1 ReqB:S:C:T=0:0:*:* TRES=cpu=1,node=1,billing=1 "
    "Command=/home/ada/it's here/runs/b/job.sbatch WorkDir=/home/ada/it's here "
    "Comment=samestep:/home/ada/it's here/runs/b StdErr=/home/ada/it's here/runs/b/slurm-19.out "
    "StdIn=/dev/null StdOut=/home/ada/it's here/runs/b/slurm-19.out Power= "
)
COMPLETED = (
    "JobId=20 JobName=job.sh " + _HEAD + "JobState=COMPLETED Reason=None Restarts=0 ExitCode=0:15 "
    "RunTime=00:00:11 TimeLimit=00:01:00 NodeList=node1 BatchHost=node1 Command=/home/ada/job.sh "
    "WorkDir=/home/ada StdErr=/dev/null StdIn=/dev/null StdOut=/dev/null Power= "
)


def test_jobs_are_shown_with_what_is_known_each_on_one_line():
    job = parse_job(PENDING)
    assert (job.job, job.name, job.state) == (7, "spiral", "PENDING")
    assert (job.user, job.uid) == ("ada", 1000)
    assert (job.reason, job.nodes, job.starts_at) == ("Dependency", "", "Unknown")
    assert (job.elapsed_s, job.limit_s, job.restarts) == (0, None, 0)
    assert job.run == Path("/home/ada/runs/a")
    assert not job.ended
    assert parse_job(PENDING.replace(" NodeList= ", " NodeList=(null) ")).nodes == ""
    job = parse_job(RUNNING)
    assert (job.name, job.nodes, job.restarts) == ("my first job", "node[1-2]", 2)
    assert job.elapsed_s == ((24 + 2) * 60 + 3) * 60 + 4
    assert job.limit_s == 2 * 86400
    assert job.run == Path("/home/ada/it's here/runs/b")
    assert job.log == Path("/home/ada/it's here/runs/b/slurm-19.out")
    job = parse_job(COMPLETED)
    assert (job.state, job.ended, job.exit_code) == ("COMPLETED", True, "0:15")
    assert (job.elapsed_s, job.limit_s) == (11, 60)
    assert (job.run, job.log) == (None, None)
    for state, ended in {"COMPLETING": False, "SUSPENDED": False, "NODE_FAIL": True}.items():
        assert parse_job(RUNNING.replace("JobState=RUNNING", f"JobState={state}")).ended is ended
    assert LONG in "".join(shown(None)), "a pipe gets everything"
    [line] = [line for line in shown(80) if line.strip().startswith("123456")]
    assert "a-name" in line
    assert "…" in line
    for whole in ("COMPLETED", "48:00:12", "12,345 12%", "2.3456"):
        assert whole in line
    assert all(len(line) <= 80 for line in shown(80))


LONG = "a-name-as-long-as-people-give-them-to-their-experiments"
OF_LONG_NAME = {"job": 123456, "name": LONG, "nodes": "node[1-2]", "restarts": 12}
JOB = replace(parse_job(COMPLETED), **OF_LONG_NAME, elapsed_s=172_812)
PROGRESS = Progress(step=12_345, total_steps=99_999, loss=2.3456, eta_s=90_000, starts=12)


def shown(width: int | None) -> list[str]:
    return list(text_lines(jobs_table([(JobAndRun(job=JOB), PROGRESS)]), width))


class Clock:  # time that passes by sleeping alone; what is planned for a moment happens then
    def __init__(self) -> None:
        self.now, self.plan = 0.0, []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        while self.plan and self.plan[0][0] <= self.now:
            self.plan.pop(0)[1]()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(logs, "time", clock)
    return clock


def job(state: str):
    return parse_job(f"JobId=5 JobName=x UserId=ada({os.getuid()}) JobState={state}")


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


@pytest.mark.parametrize("state", ["PENDING", "RUNNING"])
def test_following_asks_the_controller_every_few_seconds(tmp_path, monkeypatch, clock, state):
    asked = []

    def find(number):
        asked.append(clock.now)
        return job(state if clock.now < 60 else "COMPLETED")

    monkeypatch.setattr(logs, "find_job", find)
    logs._show(lambda: {tmp_path / "log": None}, job(state))
    assert 10 <= len(asked) <= 13, "a minute of waiting"


def test_a_followed_line_is_shown_once_it_is_whole(tmp_path, monkeypatch, clock, capsys):
    log = tmp_path / "log"
    log.write_bytes(b" 3: one\n 3: t")
    two = " 3: twö\n".encode()
    clock.plan = [
        (1, lambda: append(log, two[5:7])),  # to the middle of the ö
        (2, lambda: append(log, two[7:])),
        (3, lambda: append(log, b"11: no\n 3: last, torn")),
    ]
    monkeypatch.setattr(logs, "find_job", lambda _: job("COMPLETED"))
    logs._show(lambda: {log: 3}, job("RUNNING"))
    assert capsys.readouterr().out == "one\ntwö\nlast, torn"


@pytest.fixture
def script_run(slurm, tmp_path):
    """Give the run of a script of the user's, with a log; its job's script is left to write."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "slurm-5.out").write_text("samestep: job 5\n0: a\n1: b\n")
    return run


@pytest.mark.parametrize("launcher", ["srun --label x.py", "torchrun \\\n  --rdzv-backend=c10d"])
def test_a_rank_of_a_script_has_its_lines(script_run, output_of, launcher):
    (script_run / "job.sbatch").write_text(f"{launcher}\n")
    assert output_of("slurm", "logs", script_run, "--rank", "1") == "b\n"
    assert output_of("slurm", "logs", script_run) == "samestep: job 5\n0: a\n1: b\n"
    assert output_of("slurm", "logs", script_run, "--rank", "0") == "a\n"
    output_of("slurm", "logs", script_run, "--rank", "first", code=2)


def test_all_ranks_are_shown_with_their_labels_in_lines_broken_at_words(script_run, output_of):
    (script_run / "settings.toml").touch()
    (script_run / "slurm-5.out").write_text("zero\n")
    for rank in (1, 10, 2):
        (script_run / f"rank-{rank}.log").write_text(f"is {rank}\n")
    shown = output_of("slurm", "logs", script_run, "--rank", "all")
    assert shown == "0: zero\n1: is 1\n2: is 2\n10: is 10\n"
    assert output_of("slurm", "logs", script_run, "--rank", "0") == "zero\n"
    folded = logs._folded(f"short\n{'word ' * 30}\nlast, torn", 80)
    assert max(map(len, folded.splitlines())) <= 80
    assert folded.split() == ["short", *["word"] * 30, "last,", "torn"]
    assert folded.endswith("\nlast, torn")
    assert logs._folded("x" * 100 + "\n", 80) == "x" * 100 + "\n"
