"""What `scontrol -o show job` prints, in the form that a real Slurm gave it; and its table."""

from dataclasses import replace
from pathlib import Path

from samestep.commands.slurm.status import jobs_table
from samestep.reporting.table import text_lines
from samestep.slurm.queue import JobAndRun, Progress, parse_job

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


def test_a_pending_job_has_a_reason_and_neither_nodes_nor_limit():
    job = parse_job(PENDING)
    assert (job.job, job.name, job.state) == (7, "spiral", "PENDING")
    assert (job.user, job.uid) == ("ada", 1000)
    assert (job.reason, job.nodes, job.starts_at) == ("Dependency", "", "Unknown")
    assert (job.elapsed_s, job.limit_s, job.restarts) == (0, None, 0)
    assert job.run == Path("/home/ada/runs/a")
    assert not job.ended
    assert parse_job(PENDING.replace(" NodeList= ", " NodeList=(null) ")).nodes == ""


def test_a_running_job_is_read_with_the_spaces_of_its_name_and_its_paths():
    job = parse_job(RUNNING)
    assert (job.name, job.nodes, job.restarts) == ("my first job", "node[1-2]", 2)
    assert job.elapsed_s == ((24 + 2) * 60 + 3) * 60 + 4
    assert job.limit_s == 2 * 86400
    assert job.run == Path("/home/ada/it's here/runs/b")
    assert job.log == Path("/home/ada/it's here/runs/b/slurm-19.out")


def test_a_completed_job_of_somebody_elses_making_has_no_run_and_no_log():
    job = parse_job(COMPLETED)
    assert (job.state, job.ended, job.exit_code) == ("COMPLETED", True, "0:15")
    assert (job.elapsed_s, job.limit_s) == (11, 60)
    assert (job.run, job.log) == (None, None)
    for state, ended in {"COMPLETING": False, "SUSPENDED": False, "NODE_FAIL": True}.items():
        assert parse_job(RUNNING.replace("JobState=RUNNING", f"JobState={state}")).ended is ended


# --- the table of `samestep slurm status`

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
