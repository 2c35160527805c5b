"""`samestep.submit`, with Slurm's programs played by scripts, `sweep` and `check` from Python.

That a job gives its run, or the error of its rank, is seen on a real Slurm: cluster/test_jobs.py.
"""

import pytest

import samestep
from samestep import SubmittedJob, UserError
from tests.api.recipes import made
from tests.checking.planted import BASE, forked, planted


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
def test_a_mistake_is_refused_before_anything_is_submitted_or_trained(wrong, slurm, here):
    with pytest.raises(UserError):
        samestep.submit("spiral", **wrong)
    assert not any(line.startswith("sbatch") for line in slurm.calls)
    for more in ({"lr": []}, {"lr": 0.1}, {"lr": [0.1, 0.01], "run_dir": "x"}):
        with pytest.raises(UserError):
            samestep.sweep(made(), **more, folder="runs", quiet=True)
    assert not (here / "runs").exists()


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


@pytest.fixture(autouse=True)
def _forked_ranks(monkeypatch):
    monkeypatch.setattr("samestep.scripts.checking.ranks_of_script.start_processes", forked)


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
