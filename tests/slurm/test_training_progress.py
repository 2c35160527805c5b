"""A job as scontrol shows it, and how far its run has come by the files in its directory."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from samestep.commands.slurm.status import jobs_table
from samestep.reporting.table import text_lines
from samestep.slurm.queue import JobAndRun, Progress, parse_job, read_progress

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
    assert (progress.step, progress.status, progress.why) == (10, "", "")


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


def test_a_pending_job_has_a_reason_and_others_what_is_known_of_them():
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


LONG = "a-name-as-long-as-people-give-them-to-their-experiments"
OF_LONG_NAME = {"job": 123456, "name": LONG, "nodes": "node[1-2]", "restarts": 12}
JOB = replace(parse_job(COMPLETED), **OF_LONG_NAME, elapsed_s=172_812)
PROGRESS = Progress(step=12_345, total_steps=99_999, loss=2.3456, eta_s=90_000, starts=12)


def shown(width: int | None) -> list[str]:
    return list(text_lines(jobs_table([(JobAndRun(job=JOB), PROGRESS)]), width))


def test_on_a_narrow_terminal_the_name_alone_is_cut_and_each_job_is_one_line():
    assert LONG in "".join(shown(None)), "a pipe gets everything"
    [line] = [line for line in shown(80) if line.strip().startswith("123456")]
    assert "a-name" in line
    assert "…" in line
    for whole in ("COMPLETED", "48:00:12", "12,345 12%", "2.3456"):
        assert whole in line
    assert all(len(line) <= 80 for line in shown(80))
