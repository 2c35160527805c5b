"""A submitted job is the same training as the local command, on any nodes and tasks."""

import json
import re

import pytest

from samestep import submit as submit_in_python
from samestep.base.errors import UserError
from samestep.base.run.records import read_records
from tests.cluster.jobs import Submitted, samestep, set_pace, submit, write_recipe
from tests.cluster.sandbox import WITHIN_S, wait_for
from tests.command_line import one_message
from tests.tiny import trained


@pytest.fixture(scope="module")
def local(tmp_path_factory) -> list[tuple[int, float]]:
    folder = tmp_path_factory.mktemp("local")
    trained(write_recipe(folder), folder / "run")
    return [(r["step"], r["loss"]) for r in read_records(folder / "run") if r["event"] == "step"]


def assert_local_losses(job: Submitted, local: list[tuple[int, float]]) -> None:
    losses = job.losses()
    assert [step for step, _ in losses] == [step for step, _ in local]
    assert [loss for _, loss in losses] == pytest.approx([loss for _, loss in local], rel=1e-5)
    assert job.log.count("epoch 1 ") == 1


def test_two_jobs_at_once_have_the_losses_of_the_local_run(sandbox, tmp_path, local):
    write_recipe(tmp_path)
    set_pace(tmp_path, 1)  # so that the first still runs when the second has begun
    size = ("--nodes", "2", "--ntasks-per-node", "2", "--cpus-per-task", "1", "--launcher")
    launchers = ("srun", "torchrun")
    jobs = [submit(sandbox, tmp_path, "tiny.py", *size, launcher) for launcher in launchers]
    for job in jobs:
        job.wait_for_step(1)
    assert {sandbox.state(job.job) for job in jobs} == {"RUNNING"}
    set_pace(tmp_path, None)
    for job, launcher in zip(jobs, launchers, strict=True):
        job.wait("COMPLETED")
        result, start = job.result(), job.records()[0]
        assert (result["status"], result["world_size"]) == ("completed", 4)
        assert (start["num_nodes"], start["launcher"]) == (2, launcher)
        assert job.log.splitlines()[-1] == "samestep: completed."
        assert_local_losses(job, local)


def test_lightnings_trainer_takes_the_same_steps_on_two_nodes(sandbox, tmp_path, local):
    write_recipe(tmp_path)
    size = ("--nodes", "2", "--ntasks-per-node", "1")
    job = submit(sandbox, tmp_path, "tiny.py", *size, "--", "--engine", "lightning")
    job.wait("COMPLETED")
    start = job.records()[0]
    assert (start["num_nodes"], start["launcher"]) == (2, "srun")
    assert_local_losses(job, local)


SAYS = """
import os, sys
names = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE')
said = [*(os.environ[n] for n in names), os.environ['MASTER_ADDR'] != '', *sys.argv[1:]]
print(*said)
with open(f'said-{said[0]}.txt', 'w') as file:
    print(*said, file=file)
"""


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_any_script_runs_with_the_variables_of_torchrun(sandbox, tmp_path, launcher):
    folder = tmp_path / 'it\'s a "place"'
    folder.mkdir()
    (folder / "mine.py").write_text(SAYS)
    how = ("--nodes", "2", "--ntasks-per-node", "2", "--launcher", launcher)
    job = submit(sandbox, folder, "mine.py", *how, "--", "--my-flag", "it's 1")
    job.wait("COMPLETED")
    said = [path.read_text() for path in sorted(folder.glob("said-*.txt"))]
    assert said == [f"{rank} 4 {rank % 2} 2 True --my-flag it's 1\n" for rank in range(4)]
    if launcher == "srun":
        shown = samestep(sandbox, folder, "slurm", "logs", job.job, "--rank", "3").stdout
        assert shown == "3 4 1 2 True --my-flag it's 1\n"


def test_what_the_cluster_cannot_give_or_does_not_know_is_refused(sandbox, tmp_path):
    write_recipe(tmp_path)

    def refused(*words: str) -> str:
        done = samestep(sandbox, tmp_path, "slurm", *words)
        return one_message(done.returncode, done.stdout + done.stderr)

    told = refused("submit", "tiny.py", "--partition", "debgu")
    assert "Did you mean 'debug'? The partitions are: debug, urgent." in told
    told = refused("submit", "tiny.py", "--nodes=9", "--", "--batch-size", "64")
    assert "--nodes 9: partition debug has only 2." in told
    told = refused("submit", "tiny.py", "--mem", "900G")  # by sbatch itself
    assert "sbatch: error: " in told
    assert "#SBATCH --mem=900G" in told
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())
    for verb in ("status", "logs", "cancel"):
        assert "999999" in refused(verb, "999999")


def test_of_a_sweep_one_task_is_requeued_another_cancelled_what_is_left_trained(sandbox, tmp_path):
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


CRASH = """\
import ctypes, os, time
def crash():
    ctypes.string_at(0)
if os.environ["RANK"] == "1":
    crash()
time.sleep(600)
"""
BOOM = """\
import torch
import torch.distributed as dist
def main():
    dist.init_process_group("gloo")
    for step in range(1000):
        if step == 3 and dist.get_rank() == 1:
            raise RuntimeError("boom from rank 1")
        dist.all_reduce(torch.ones(2))
main()
"""
HANG = """\
import signal, time
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
print("listens to nobody", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("script", "ended", "line"),
    [
        (CRASH, " was ended by SIGSEGV", "3 in crash: ctypes"),
        (BOOM, r".* RuntimeError: boom from rank 1", "7 in main: raise RuntimeError"),
    ],
    ids=["crash", "error"],
)
def test_the_rank_that_failed_first_is_named_with_its_line(sandbox, tmp_path, script, ended, line):
    (tmp_path / "mine.py").write_text(script)
    size = ("--nodes", "2", "--ntasks-per-node", "1", "--restarts", "0", "--max-restarts", "0")
    launchers = [("--launcher", name) for name in ("srun", "torchrun")]
    for job in [submit(sandbox, tmp_path, "mine.py", *size, *how) for how in launchers]:
        job.wait("FAILED")
        assert re.search(rf"rank 1 on node[12]{ended}", job.log.splitlines()[-1]), job.log
        assert f"\n  at {job.run}/code/mine.py:{line}" in job.log
        logs = samestep(sandbox, tmp_path, "slurm", "logs", job.job, "--rank", "1").stdout
        assert script is CRASH or "RuntimeError: boom from rank 1\n" in logs


def test_ranks_that_hang_end_early_and_without_requeue_it_says_how_to_go_on(sandbox, tmp_path):
    (tmp_path / "mine.py").write_text(HANG)
    limit = ("--time", "1", "--signal-s", "20")
    job = submit(sandbox, tmp_path, "mine.py", "--ntasks-per-node", "2", *limit)
    wait_for(lambda: job.log.count("listens") == 2)
    sandbox.run("scontrol", "update", f"jobid={job.job}", "requeue=0")
    job.wait("FAILED")
    last = job.log.splitlines()[-1]
    assert "had not ended 14 s after the signal" in last
    assert f"sbatch {job.run}/job.sbatch" in last
    assert "restart 1" not in job.log
    shown = samestep(sandbox, tmp_path, "slurm", "status", job.job).stdout
    assert f"sbatch {job.run}/job.sbatch" in shown


# The name of rank 0's node means nothing on node2, as where a node's resolver is broken.
PROLOG = """#!/bin/sh
test "$SLURMD_NODENAME" = node1 || echo export MASTER_ADDR=no-such-host.invalid
"""


def test_a_node_that_is_not_fit_is_named_and_excluded(sandbox, tmp_path):
    write_recipe(tmp_path)
    prolog = tmp_path / "prolog.sh"
    prolog.write_text(PROLOG)
    prolog.chmod(0o755)
    env = ("--env", f"SLURM_TASK_PROLOG={prolog}")
    job = submit(sandbox, tmp_path, "tiny.py", "--nodes", "1-2", "--preflight", *env)
    job.wait("COMPLETED")
    (said,) = [line for line in job.log.splitlines() if "(restart 1)" in line]
    assert "roll call: rank 1 of 2 never came" in said
    assert said.count("node2") >= 2
    assert sandbox.field(job.job, "ExcNodeList") == "node2"
    assert job.result()["world_size"] == 1
    assert len([r for r in job.all_records() if r["event"] == "start"]) == 1
    shown = samestep(sandbox, tmp_path, "slurm", "status", job.job).stdout
    assert "excluded node2" in shown
    restarts = json.loads((job.run / "slurm.json").read_text())
    assert restarts["excluded"] == ["node2"]


BROKEN = """
import os
if os.environ["RANK"] == "1":
    raise ValueError("planted")
"""


@pytest.fixture
def here(sandbox, tmp_path, monkeypatch):
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, sandbox.environment[name])
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path)
    return tmp_path


def test_a_job_gives_its_run_or_the_error_of_its_rank(here):
    (here / "broken.py").write_text(BROKEN)
    good = submit_in_python("tiny.py", nodes=2, epochs=1)
    broken = submit_in_python("broken.py", nodes=2, restarts=0)
    assert good.status()["state"] in ("PENDING", "RUNNING", "COMPLETED")
    found = good.result(WITHIN_S)
    assert (found.path, found.result["world_size"]) == (good.path, 2)
    told = good.status()
    assert (told["state"], told["training"]["status"]) == ("COMPLETED", "completed")
    with pytest.raises(UserError, match="1: ValueError: planted"):
        broken.result(WITHIN_S)
    assert broken.status()["state"] == "FAILED"


def test_a_cancelled_job_says_that_no_rank_started(here):
    held = submit_in_python("tiny.py", sbatch=["--hold"])
    assert held.status()["reason"] == "JobHeldUser"
    assert not held.wait(0.1, every_s=0.05)
    held.cancel()
    assert held.wait(WITHIN_S)
    assert (held.status()["state"], held.status()["training"]) == ("CANCELLED", None)
    with pytest.raises(UserError, match=r"CANCELLED.*no rank"):
        held.result()
