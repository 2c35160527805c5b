"""Whatever ends a start of a job, the next goes on and the training is the uninterrupted one."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

from samestep.cluster.slurm.sandbox_cluster import status
from samestep.launch.ranks.watched import STALLED
from tests.cluster.jobs import Submitted, samestep, set_pace, submit, write_recipe
from tests.cluster.nodes import kill_node, start_node
from tests.cluster.sandbox import wait_for

TWO = ("--nodes", "2", "--ntasks-per-node", "1")


@pytest.fixture(scope="module")
def uninterrupted(sandbox, tmp_path_factory) -> Submitted:
    folder = tmp_path_factory.mktemp("uninterrupted")
    write_recipe(folder)
    job = submit(sandbox, folder, "tiny.py", *TWO)
    job.wait("COMPLETED")
    return job


@pytest.fixture
def recipe(tmp_path) -> Path:
    set_pace(tmp_path, 0.3)
    return write_recipe(tmp_path)


def assert_nothing_lost(job: Submitted, uninterrupted: Submitted) -> None:
    """Check that a job which was ended and went on is the uninterrupted one, bit by bit."""
    assert job.result()["status"] == "completed"
    assert job.losses() == uninterrupted.losses()
    assert job.result()["weights_sha256"] == uninterrupted.result()["weights_sha256"]
    # Each start begins at the newest checkpoint that an earlier one announced. A kill can come
    # between the announcement, in the index, and its record.
    announced = trained = 0
    for record in job.all_records():
        if record["event"] == "checkpoint":
            announced = record["step"]
        if record["event"] == "step":
            trained = record["step"]
        if record["event"] == "resume":
            assert announced <= record["step"] <= trained


def starts(job: Submitted) -> int:
    there = (job.run / "events.jsonl").exists()
    return sum(record["event"] == "start" for record in job.all_records()) if there else 0


def test_a_job_that_comes_to_its_time_limit_goes_on(sandbox, recipe, tmp_path, uninterrupted):
    # One minute is the shortest limit; Slurm warns up to a minute early, so right at the start.
    set_pace(tmp_path, 2.1)  # an epoch of 30 steps is longer than the limit
    job = submit(sandbox, tmp_path, "tiny.py", *TWO, "--time", "1", "--signal-s", "40")
    wait_for(lambda: "(restart 1)" in job.log)
    set_pace(tmp_path, None)
    job.wait("COMPLETED")
    assert starts(job) >= 2  # the second is warned early, too: a slow machine needs a third
    assert_nothing_lost(job, uninterrupted)


def test_a_job_that_everything_happens_to_loses_nothing(sandbox, recipe, tmp_path, uninterrupted):
    set_pace(tmp_path, 0.6)  # it still trains when the last of this has happened
    job = submit(sandbox, tmp_path, "tiny.py", *TWO, "--", "--checkpoint-every-steps", "2")

    def train_on(start: int) -> None:
        def saved() -> bool:
            records = job.all_records() if starts(job) == start else []
            after = [r["event"] for r in records]
            last = max((n for n, event in enumerate(after) if event == "start"), default=0)
            return "checkpoint" in after[last:]

        wait_for(saved)

    train_on(1)
    sandbox.run("srun", "--partition=urgent", "-N2", "--exclusive", "true")
    train_on(2)
    os.kill(job.processes()[1], signal.SIGKILL)
    wait_for(lambda: "(restart 1)" in job.log)
    cause = next(line for line in job.log.splitlines() if "(restart 1)" in line)
    assert "rank 1 on node2 was killed by SIGKILL" in cause
    train_on(3)
    kill_node(sandbox.folder, "node2")
    try:
        assert not status(sandbox.folder).is_up
        sandbox.run("scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=test")
        wait_for(lambda: sandbox.state(job.job) == "PENDING")
    finally:
        start_node(sandbox.folder, "node2")
    set_pace(tmp_path, None)
    job.wait("COMPLETED")
    assert starts(job) == 4
    assert_nothing_lost(job, uninterrupted)


SCRIPT = """
import os, signal, sys, time
from pathlib import Path
saved = Path(os.environ["SAMESTEP_RUN_DIR"], "steps")
begin = int(saved.read_text()) if saved.exists() else 0
def save(*_):
    saved.write_text(str(step))
    sys.exit(1)
signal.signal(signal.SIGUSR1, save)
pace = Path("pace")
print("begins at step", begin, flush=True)
for step in range(begin + 1, 1001):
    if pace.exists():
        time.sleep(float(pace.read_text()))  # a training as slow as the test wants it
print("has done", step, flush=True)
"""


def test_a_script_of_the_users_that_saves_when_warned_goes_on(sandbox, tmp_path):
    (tmp_path / "mine.py").write_text(SCRIPT)
    set_pace(tmp_path, 0.05)
    job = submit(sandbox, tmp_path, "mine.py", "--signal-s", "30")
    wait_for(lambda: "begins at step 0" in job.log)
    sandbox.run("scancel", "--batch", "--signal=USR1", job.job)
    wait_for(lambda: "(restart 1)" in job.log)
    saved = int((job.run / "steps").read_text())
    set_pace(tmp_path, None)
    job.wait("COMPLETED")
    assert f"begins at step {saved}\n" in job.log
    assert 1 <= saved < 1000
    assert "has done 1000\n" in job.log


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_a_job_that_is_cancelled_saves_and_stays_away(sandbox, recipe, tmp_path, launcher):
    how = (*TWO, "--time", "30", "--signal-s", "30", "--launcher", launcher)
    job = submit(sandbox, tmp_path, "tiny.py", *how)
    if launcher == "srun":  # also as soon as it runs, while its ranks still import
        job.wait("RUNNING")
    else:
        job.wait_for_step(3)
    done = samestep(sandbox, tmp_path, "slurm", "cancel", job.job)
    assert done.returncode == 0, done.stderr
    job.wait("CANCELLED")
    stop = job.all_records()[-1]
    assert (stop["event"], stop["reason"]) == ("stop", "SIGUSR1")
    index = json.loads((job.run / "checkpoints" / "index.json").read_text())
    assert index["last"]["step"] == stop["step"] >= (3 if launcher == "torchrun" else 1)
    assert f"saved at step {stop['step']}." in job.log
    if launcher == "torchrun":
        return
    set_pace(tmp_path, None)
    again = submit(sandbox, tmp_path, str(job.run.relative_to(tmp_path)))
    assert again.run == job.run
    again.wait("COMPLETED")
    assert (again.result()["status"], again.result()["world_size"]) == ("completed", 2)


def test_a_cancel_that_is_not_to_wait_ends_a_rank_that_hangs_at_once(sandbox, recipe, tmp_path):
    how = (*TWO, "--signal-s", "120", "--", "--checkpoint-every-steps", "2")
    job = submit(sandbox, tmp_path, "tiny.py", *how)
    job.wait_for_step(3)
    os.kill(job.processes()[1], signal.SIGSTOP)
    done = samestep(sandbox, tmp_path, "slurm", "cancel", job.job, "--now")
    assert done.stdout == f"Job {job.job} is cancelled.\n"
    job.wait("CANCELLED", within_s=100)
    assert job.all_records()[-1]["event"] != "stop"
    assert re.search(r"newest checkpoint is of step [24]\.", job.log)
    wait_for(lambda: not job.processes())


def let_hang(recipe: Path) -> int:
    """Let rank 1 hang in step 9 of the job's first start; return the line."""
    sleeps = "            time.sleep(3600)"
    counts = f"""    if os.environ['SLURM_PROCID'] == '1' and step == 8 and outputs.requires_grad:
        hung = PACE.with_name("hung")
        if not hung.exists():
            hung.touch()
{sleeps}
"""
    text = recipe.read_text().replace(
        "def loss(outputs, targets)", "def loss(outputs, targets, *, step)"
    )
    text = text.replace("    if PACE", f"{counts}    if PACE")
    recipe.write_text(text)
    return text.splitlines().index(sleeps) + 1


def test_a_job_that_a_rank_hung_goes_on_and_completes(sandbox, recipe, tmp_path, uninterrupted):
    line = let_hang(recipe)
    # The ranks' own patience with each other is shorter than the watcher's: it still judges first.
    how = ("--timeout-s", "8", "--checkpoint-every-steps", "2")
    job = submit(sandbox, tmp_path, "tiny.py", *TWO, "--", *how)
    wait_for(lambda: "(restart 1)" in job.log)
    set_pace(tmp_path, None)
    job.wait("COMPLETED")
    assert starts(job) == 2
    cause = next(text for text in job.log.splitlines() if "(restart 1)" in text)
    assert "rank 1 on node2 took no part in step 9 for" in cause
    assert f"tiny.py:{line}" in cause
    resumed = [r["step"] for r in job.all_records() if r["event"] == "resume"]
    assert resumed == [8]
    assert_nothing_lost(job, uninterrupted)
    assert "stall" not in job.result()
    assert not [*job.run.glob(".stall-*")], "nothing of the hang stays but what is for people"


def test_a_rank_that_hangs_under_torchrun_ends_the_job_and_is_named(sandbox, recipe, tmp_path):
    line = let_hang(recipe)
    how = (*TWO, "--launcher", "torchrun", "--no-requeue", "--", "--stall-s", "15")
    job = submit(sandbox, tmp_path, "tiny.py", *how)
    job.wait("FAILED")
    stall = job.result()["stall"]
    assert (stall["host"], stall["line"]) == ("node2", line)
    # torchrun numbers the ranks as their nodes come.
    told = f"rank {stall['rank']} on node2 took no part in step 9 for"
    assert told in job.log.splitlines()[-1]
    assert sandbox.field(job.job, "ExitCode") == f"{STALLED}:0"


FAILS = "\n    raise KeyError('lost on the way')\n"


def test_a_mistake_that_comes_again_in_every_start_ends_the_job_at_once(sandbox, recipe, tmp_path):
    recipe.write_text(recipe.read_text().replace("def model():\n", f"def model():{FAILS}"))
    (tmp_path / "lacks.py").write_text("import no_such_module\n")
    jobs = [submit(sandbox, tmp_path, file, *TWO) for file in ("tiny.py", "lacks.py")]
    said = ("KeyError: 'lost on the way'", "No module named 'no_such_module'")
    for job, why in zip(jobs, said, strict=True):
        job.wait("FAILED")
        assert "(restart" not in job.log
        assert why in job.log.splitlines()[-1]
    result = jobs[0].result()
    assert result["status"] == "failed"
    assert "lost on the way" in result["reason"]
    shown = samestep(sandbox, tmp_path, "slurm", "status", jobs[1].job).stdout
    assert "has not begun" not in shown


def test_status_and_logs_tell_of_each_state_of_a_job(sandbox, recipe, tmp_path):
    def told(job: Submitted) -> dict:
        text = samestep(sandbox, tmp_path, "slurm", "status", job.job, "--json").stdout
        return json.loads(text)

    job = submit(sandbox, tmp_path, "tiny.py", "--time", "20", "--sbatch=--hold")
    assert told(job)["queue"]["state"] == "PENDING"
    assert told(job)["training"] is None
    logs = samestep(sandbox, tmp_path, "slurm", "logs", job.job)
    assert "is pending" in logs.stdout
    sandbox.run("scontrol", "release", job.job)
    job.wait_for_step(3)
    now = told(job)
    assert now["queue"]["state"] == "RUNNING"
    assert now["training"]["step"] >= 3
    assert now["training"]["eta_s"] > 0
    second = submit(sandbox, tmp_path, str(job.run), "--after", f"{job.job}:any")
    assert sandbox.field(second.job, "Dependency").startswith(f"afterany:{job.job}")
    samestep(sandbox, tmp_path, "slurm", "cancel", second.job)
    set_pace(tmp_path, None)
    followed = samestep(sandbox, tmp_path, "slurm", "logs", job.job, "--follow")
    assert followed.returncode == 0
    assert followed.stdout.endswith("samestep: completed.\n")
    job.wait("COMPLETED")
    training = told(job)["training"]
    assert (training["status"], training["starts"]) == ("completed", 1)
    table = samestep(sandbox, tmp_path, "slurm", "status").stdout
    mine = next(words for line in table.splitlines() if (words := line.split())[:1] == [job.job])
    assert "COMPLETED" in mine
