"""Job arrays on a real Slurm: each task is a job with a run of its own."""

import re

from tests.cluster.jobs import Submitted, samestep, set_pace, write_recipe
from tests.cluster.sandbox import wait_for


def test_of_a_sweep_one_task_is_requeued_another_cancelled_and_the_command_trains_what_is_left(
    sandbox, tmp_path
):
    write_recipe(tmp_path)
    set_pace(tmp_path, 0.5)
    words = ("sweep", "tiny.py", "--lr", "0.1,0.2,0.3", "--run-dir", "sweep", "--slurm")

    def sweep() -> list[Submitted]:
        done = samestep(sandbox, tmp_path, *words, "--at-once", "2", "--", "--signal-s", "30")
        assert done.returncode == 0, done.stderr
        found = re.findall(r"^job (\S+)  (\S+)$", done.stdout, re.MULTILINE)
        folder = tmp_path / "sweep"
        return [Submitted(sandbox=sandbox, job=j, run=folder / name) for j, name in found]

    requeued, cancelled, waiting = sweep()
    requeued.wait_for_step(3)
    cancelled.wait_for_step(3)
    assert sandbox.state(waiting.job) == "PENDING"  # two run at a time
    sandbox.run("scontrol", "requeue", requeued.job)
    done = samestep(sandbox, tmp_path, "slurm", "cancel", cancelled.job)
    assert done.returncode == 0, done.stderr
    cancelled.wait("CANCELLED")
    assert cancelled.all_records()[-1]["event"] == "stop"
    set_pace(tmp_path, None)
    requeued.wait("COMPLETED")
    waiting.wait("COMPLETED")
    assert sum(record["event"] == "start" for record in requeued.all_records()) == 2
    (left,) = sweep()
    left.wait("COMPLETED")
    for job in (requeued, left, waiting):
        assert job.result()["status"] == "completed"


def test_each_task_of_a_scripts_array_has_its_number_its_run_and_its_log(sandbox, tmp_path):
    (tmp_path / "mine.py").write_text("import os, sys; print(sys.argv, os.environ['MINE'])\n")
    words = ("mine.py", "--array", "3,7", "--env", "MINE=x", "--", "--seed", "%a")
    done = samestep(sandbox, tmp_path, "slurm", "submit", *words)
    assert done.returncode == 0, done.stderr
    number = done.stdout.split()[1].partition("_")[0]
    for task in ("3", "7"):
        sandbox.wait_for_state(f"{number}_{task}", "COMPLETED")
        (run,) = tmp_path.glob(f"runs/*/task-{task}")
        wait_for(lambda run=run: "samestep: completed." in run_log(run))
        assert f"'--seed', '{task}'" in run_log(run)
        shown = samestep(sandbox, tmp_path, "slurm", "logs", f"{number}_{task}")
        assert f"'--seed', '{task}'" in shown.stdout
    unknown = samestep(sandbox, tmp_path, "slurm", "cancel", f"{number}_9")
    assert (unknown.returncode, "was refused" in unknown.stderr) == (2, False)


def run_log(run) -> str:
    (log,) = run.glob("slurm-*.out")
    return log.read_text()
