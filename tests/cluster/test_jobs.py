"""A submitted job is the same training as the local command, on any nodes and tasks."""

import pytest

from samestep.run.records import read_records
from tests.cluster.jobs import Submitted, samestep, set_pace, submit, write_recipe
from tests.tiny import trained


@pytest.fixture(scope="module")
def local(tmp_path_factory) -> list[tuple[int, float]]:
    """The steps of the same training on this machine, each with its loss."""
    folder = tmp_path_factory.mktemp("local")
    trained(write_recipe(folder), folder / "run")
    return [(r["step"], r["loss"]) for r in read_records(folder / "run") if r["event"] == "step"]


def assert_local_losses(job: Submitted, local: list[tuple[int, float]]) -> None:
    """Check that a job took the steps of the local run, printed by only one rank."""
    losses = job.losses()
    assert [step for step, _ in losses] == [step for step, _ in local]
    assert [loss for _, loss in losses] == pytest.approx([loss for _, loss in local], rel=1e-5)
    assert job.log.count("epoch 1 ") == 1


def test_two_jobs_at_once_on_the_same_two_nodes_have_the_losses_of_the_local_run(
    sandbox, tmp_path, local
):
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
def test_any_script_runs_unchanged_with_the_variables_of_torchrun_in_any_folder(
    sandbox, tmp_path, launcher
):
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
        assert done.returncode == 2, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        assert done.stderr.count("samestep: ") == 1
        return done.stderr

    told = refused("submit", "tiny.py", "--partition", "debgu")
    assert "Did you mean 'debug'? The partitions are: debug, urgent." in told
    told = refused("submit", "tiny.py", "--nodes=9", "--", "--batch-size", "64")
    assert "--nodes 9: partition debug has 2 in all." in told
    told = refused("submit", "tiny.py", "--mem", "900G")  # by sbatch itself
    assert "sbatch: error: " in told
    assert "#SBATCH --mem=900G" in told
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())
    for verb in ("status", "logs", "cancel"):
        assert "999999" in refused(verb, "999999")
