"""`samestep.submit`, with Slurm's programs played by scripts, `sweep` and `check` from Python."""

import os

import pytest

import samestep
from samestep import SubmittedJob, UserError
from tests.api.recipes import made
from tests.checking.planted import BASE, forked, planted
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


def test_a_job_that_is_waited_for_gives_its_run_or_the_error_of_its_rank(slurm, here):
    write_run(here / "run")
    slurm.add(77, here / "run", "RUNNING")
    job = SubmittedJob(77, here / "run")
    assert job.status()["state"] == "RUNNING"
    assert not job.wait(0.05, every_s=0.02)
    slurm.add(77, here / "run", "COMPLETED")
    assert job.wait()
    assert job.result().path == here / "run"
    (here / "slurm-77.out").write_text("samestep: job 77, start 1, on a\n1: ValueError: planted\n")
    slurm.add(77, here, "FAILED", log=str(here / "slurm-77.out"))
    with pytest.raises(UserError, match="ValueError: planted"):
        SubmittedJob(77, here).result()


@pytest.mark.parametrize("state", ["PENDING", "COMPLETED"])
def test_only_a_job_that_has_not_ended_is_cancelled(state, slurm, here):
    slurm.add(77, here, state)
    SubmittedJob(77, here).cancel()
    assert any(line.startswith("scancel") for line in slurm.calls) == (state == "PENDING")


@pytest.mark.slow
def test_a_recipe_made_in_python_is_trained_with_each_value(here, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    asked = {"lr": [0.01, 0.1], "pictures": False, "folder": "sweep", "quiet": True}
    recipe = made(settings={"epochs": 1})
    runs = samestep.sweep(recipe, **asked)
    assert [run.settings["lr"] for run in runs] == [0.01, 0.1]
    alone = samestep.train(recipe, lr=0.1, pictures=False, run_dir="alone", quiet=True)
    assert runs[1].result["weights_sha256"] == alone.result["weights_sha256"]
    before = [run.history for run in runs]
    assert [run.history for run in samestep.sweep(recipe, **asked)] == before
    with pytest.raises(UserError):
        samestep.sweep(recipe, **(asked | {"lr": [0.01, 0.2]}))


@pytest.mark.parametrize("wrong", [{"lr": []}, {"lr": 0.1}, {"lr": [0.1, 0.01], "run_dir": "x"}])
def test_a_mistake_is_an_error_before_the_first_training(wrong, here):
    with pytest.raises(UserError):
        samestep.sweep(made(), **wrong, folder="sweep", quiet=True)
    assert not (here / "sweep").exists()


@pytest.fixture(autouse=True)
def _forked_ranks(monkeypatch):
    monkeypatch.setattr("samestep.scripts.checking.check_script.start_processes", forked)


def test_a_script_is_checked_from_python_and_its_report_is_data_or_one_error(here):
    source = planted(
        ("range(3)", "range(int(sys.argv[1]))"), ("import os\n", "import os\nimport sys\n")
    )
    (here / "train.py").write_text(source)
    report = samestep.check("train.py", args=[1], nproc=2)
    assert isinstance(report, samestep.CheckReport)
    assert (report.findings, report.exit_code, report.steps, report.ranks) == ([], 0, 4, 2)
    assert "4 steps" in str(report)
    (here / "train.py").write_text(BASE)
    for script, more in ((3, {}), ("train.py", {"steps": 0}), ("no_such", {"module": True})):
        with pytest.raises(samestep.UserError):
            samestep.check(script, **more)
    for text in ("recipe = samestep.Recipe()", "samestep.open_run('x')"):
        (here / "mine.py").write_text(f"import samestep\n{text}\n")
        with pytest.raises(samestep.UserError, match="verify"):
            samestep.check("mine.py")
