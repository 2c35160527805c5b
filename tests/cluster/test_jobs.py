"""A submitted job is the same training as the local command, on any nodes and tasks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from samestep.run.records import read_records
from tests.cluster.jobs import samestep, set_pace, submit, write_recipe
from tests.command_line import run
from tests.processes import TIMEOUT_S


def local_losses(folder: Path) -> list[tuple[int, float]]:
    recipe = str(folder / "tiny.py")
    run("train", recipe, "--run-dir", str(folder / "local"), folder=folder / "outputs")
    records = read_records(folder / "local")
    return [(r["step"], r["loss"]) for r in records if r["event"] == "step"]


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    folder = tmp_path_factory.mktemp("local")
    write_recipe(folder)
    return local_losses(folder)


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_a_job_on_two_nodes_completes_with_the_losses_of_the_local_run(
    sandbox, tmp_path, local, launcher
):
    write_recipe(tmp_path)
    size = ("--nodes", "2", "--ntasks-per-node", "2")
    job = submit(sandbox, tmp_path, "tiny.py", *size, "--launcher", launcher)
    job.wait("COMPLETED")
    result = job.result()
    assert (result["status"], result["world_size"]) == ("completed", 4)
    start = job.records()[0]
    assert (start["num_nodes"], start["launcher"]) == (2, launcher)
    losses = job.losses()
    assert [step for step, _ in losses] == [step for step, _ in local]
    assert [loss for _, loss in losses] == pytest.approx([loss for _, loss in local], rel=1e-5)
    assert job.log.splitlines()[-1] == "samestep: completed."
    assert job.log.count("epoch 1 ") == 1


def test_lightnings_trainer_takes_the_same_steps_on_two_nodes(sandbox, tmp_path, local):
    write_recipe(tmp_path)
    size = ("--nodes", "2", "--ntasks-per-node", "1")
    job = submit(sandbox, tmp_path, "tiny.py", *size, "--", "--engine", "lightning")
    job.wait("COMPLETED")
    assert [loss for _, loss in job.losses()] == pytest.approx([loss for _, loss in local], 1e-5)
    start = job.records()[0]
    assert (start["num_nodes"], start["launcher"]) == (2, "srun")
    assert job.log.count("epoch 1 ") == 1


def test_two_jobs_at_once_on_the_same_nodes_do_not_collide(sandbox, tmp_path, local):
    write_recipe(tmp_path)
    set_pace(tmp_path, 1)  # so that the first still runs when the second has begun
    size = ("--nodes", "2", "--ntasks-per-node", "1", "--cpus-per-task", "1")
    jobs = [submit(sandbox, tmp_path, "tiny.py", *size) for _ in range(2)]
    for job in jobs:
        job.wait_for_step(1)
    assert {sandbox.state(job.job) for job in jobs} == {"RUNNING"}
    set_pace(tmp_path, None)
    for job in jobs:
        job.wait("COMPLETED")
        assert [loss for _, loss in job.losses()] == pytest.approx([v for _, v in local], rel=1e-5)


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_any_script_runs_unchanged_with_the_variables_of_torchrun(sandbox, tmp_path, launcher):
    (tmp_path / "mine.py").write_text(
        "import os, sys\n"
        "names = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE')\n"
        "said = [*(os.environ[n] for n in names), os.environ['MASTER_ADDR'] != '', *sys.argv[1:]]\n"
        "print(*said)\n"
        "with open(f'said-{said[0]}.txt', 'w') as file:\n"
        "    print(*said, file=file)\n"
    )
    how = ("--nodes", "2", "--ntasks-per-node", "2", "--launcher", launcher)
    job = submit(sandbox, tmp_path, "mine.py", *how, "--", "--my-flag", "it's 1")
    job.wait("COMPLETED")
    said = [path.read_text() for path in sorted(tmp_path.glob("said-*.txt"))]
    assert said == [f"{rank} 4 {rank % 2} 2 True --my-flag it's 1\n" for rank in range(4)]
    if launcher == "srun":
        shown = samestep(sandbox, tmp_path, "slurm", "logs", job.job, "--rank", "3").stdout
        assert shown == "3 4 1 2 True --my-flag it's 1\n"


def test_a_run_in_a_folder_with_spaces_and_quotes_completes(sandbox, tmp_path):
    folder = tmp_path / 'it\'s a "place"'
    folder.mkdir()
    write_recipe(folder)
    job = submit(sandbox, folder, "tiny.py", "--", "--epochs", "1")
    job.wait("COMPLETED")
    assert job.result()["status"] == "completed"


def test_a_run_in_training_takes_no_second_job_but_one_that_waits_for_it(sandbox, tmp_path):
    write_recipe(tmp_path)
    set_pace(tmp_path, 1)
    first = submit(sandbox, tmp_path, "tiny.py")
    first.wait_for_step(1)
    script = (first.run / "job.sbatch").read_text()
    told = refused(sandbox, tmp_path, "submit", str(first.run))
    assert f"Job {first.job} " in told
    assert (first.run / "job.sbatch").read_text() == script
    second = submit(sandbox, tmp_path, str(first.run), "--after", f"{first.job}:any")
    shown = samestep(sandbox, tmp_path, "slurm", "status", str(first.run), "--json").stdout
    assert json.loads(shown)["queue"]["job"] == int(first.job)  # it is the one that trains
    assert sandbox.field(second.job, "Reason") == "Dependency"
    samestep(sandbox, tmp_path, "slurm", "cancel", second.job)
    set_pace(tmp_path, None)
    first.wait("COMPLETED")


def test_flags_win_over_the_shell_and_the_job_around_it_leaves_no_trace(sandbox, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import os\nprint([n for n in ('SLURM_MEM_PER_CPU', 'ROLE_RANK') if n in os.environ])\n"
    )
    shell = {
        "SBATCH_TIMELIMIT": "5",
        "SBATCH_JOB_NAME": "x",
        "SBATCH_NO_REQUEUE": "1",
        "SBATCH_OUTPUT": "/dev/null",
        "SBATCH_PARTITION": "urgent",
        "SBATCH_ARRAY_INX": "1-2",
        "SLURM_MEM_PER_CPU": "1",
        "ROLE_RANK": "1",
        "WORLD_SIZE": "7",
    }
    done = subprocess.run(
        [sys.executable, "-m", "samestep", "slurm", "submit", "mine.py", "--time", "10"],
        cwd=tmp_path,
        env=sandbox.environment | shell,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    job = done.stdout.split()[1]
    fields = ("TimeLimit", "JobName", "Requeue", "Partition")
    found = [sandbox.field(job, name) for name in fields]
    assert found == ["00:10:00", "mine", "1", "urgent"]
    sandbox.wait_for_state(job, "COMPLETED")
    assert "0: []\n" in samestep(sandbox, tmp_path, "slurm", "logs", job).stdout


def refused(sandbox, folder: Path, *words: str) -> str:
    done = samestep(sandbox, folder, "slurm", *words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("samestep: ") == 1
    return done.stderr


def test_what_the_cluster_cannot_give_is_refused_before_it_is_queued(sandbox, tmp_path):
    write_recipe(tmp_path)
    for words, says in [
        (("--partition", "debgu"), "Did you mean 'debug'? The partitions are: debug, urgent."),
        (("--nodes", "9"), "--nodes 9: partition debug has 2 in all."),
        (("--ntasks-per-node", "50"), "the largest node of partition debug has 4"),
        (("--gpus-per-node", "8"), "have no GPUs each"),
    ]:
        given = ("tiny.py", *words, "--", "--batch-size", "64")
        assert says in refused(sandbox, tmp_path, "submit", *given)
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


def test_what_sbatch_refuses_is_shown_whole_with_the_line_it_means(sandbox, tmp_path):
    write_recipe(tmp_path)
    told = refused(sandbox, tmp_path, "submit", "tiny.py", "--mem", "900G")
    assert "sbatch: error: " in told
    assert "#SBATCH --mem=900G" in told


def test_a_job_that_nobody_knows_is_refused_by_every_verb(sandbox, tmp_path):
    for verb in ("status", "logs", "cancel"):
        assert "999999" in refused(sandbox, tmp_path, verb, "999999")
