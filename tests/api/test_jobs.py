"""`samestep.submit` and the job that it returns, with Slurm's programs played by scripts."""

import os

import pytest

import samestep
from samestep import SubmittedJob, UserError
from tests.api.recipes import made
from tests.reporting.made_runs import write_run
from tests.slurm.fake_slurm import FakeSlurm, install


@pytest.fixture
def slurm(tmp_path, here, monkeypatch) -> FakeSlurm:
    fake = install(tmp_path / "programs")
    monkeypatch.setenv("PATH", f"{fake.folder}{os.pathsep}{os.environ['PATH']}")
    return fake


def test_a_recipe_and_a_script_become_jobs_with_their_flags(slurm, here):
    (here / "script.py").write_text("print(1)\n")
    job = samestep.submit("spiral", nodes=2, time="30", lr=0.5, run_dir="runs/one")
    assert (job.number, job.path) == (77, here / "runs" / "one")
    script = (job.path / "job.sbatch").read_text()
    assert "--lr 0.5" in script
    assert "#SBATCH --nodes=2\n" in script
    other = samestep.submit("script.py", arguments=["--x", 3])
    assert "--x 3" in " ".join((other.path / "job.sbatch").read_text().split())
    sent = samestep.submit(made(), lr=0.5, run_dir="runs/made")  # kept for every start
    kept = sent.path / ".call"
    assert kept.stat().st_mode & 0o077 == 0
    assert f"SAMESTEP_TASK={kept}" in (sent.path / "job.sbatch").read_text()


@pytest.mark.parametrize(
    "wrong", [{"nodes": "x"}, {"lr": "much"}, {"no_such": 1}, {"arguments": ["a"]}, {"time": "1x"}]
)
def test_a_mistake_is_refused_before_anything_is_submitted(wrong, slurm, here):
    with pytest.raises(UserError):
        samestep.submit("spiral", **wrong)
    assert not any(line.startswith("sbatch") for line in slurm.calls)
    assert not (here / "runs").exists()


def test_a_job_is_waited_for_and_gives_its_run(slurm, here):
    write_run(here / "run")
    slurm.add(77, here / "run", "RUNNING")
    job = SubmittedJob(77, here / "run")
    assert job.status()["state"] == "RUNNING"
    assert not job.wait(0.05, every_s=0.02)
    slurm.add(77, here / "run", "COMPLETED")
    assert job.wait()
    assert job.result().path == here / "run"


def test_the_error_of_a_failed_job_has_what_its_rank_said(slurm, here):
    (here / "slurm-77.out").write_text("samestep: job 77, start 1, on a\n1: ValueError: planted\n")
    slurm.add(77, here, "FAILED", log=str(here / "slurm-77.out"))
    with pytest.raises(UserError, match="ValueError: planted"):
        SubmittedJob(77, here).result()


@pytest.mark.parametrize("state", ["PENDING", "COMPLETED"])
def test_only_a_job_that_has_not_ended_is_cancelled(state, slurm, here):
    slurm.add(77, here, state)
    SubmittedJob(77, here).cancel()
    assert any(line.startswith("scancel") for line in slurm.calls) == (state == "PENDING")
