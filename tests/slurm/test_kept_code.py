"""What a job runs: the copy that the submit made, the run's own copy, or files that are checked."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from samestep.base.errors import UserError
from samestep.cluster.slurm.options import JobOptions, keep_options, kept_options
from samestep.cluster.slurm.script import script_text
from samestep.cluster.slurm.submission import find_workload, make_script, submit
from tests import tiny

RECIPE = "from samestep import Recipe\nrecipe = Recipe()\n"


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """Be in a folder with a recipe, a script and settings, in a folder of their own."""
    (tmp_path / "work" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    for name, text in {"tiny.py": RECIPE, "plain.py": "", "how.toml": ""}.items():
        Path("mine", name).write_text(text)
    return tmp_path / "work"


def job_of(target: str, *words: str, **options):
    found = find_workload(target, list(words), [])
    return make_script(found, JobOptions(**options), Path.cwd())


def test_a_script_and_a_recipe_run_the_copy_in_the_folder_of_the_command(slurm, here):
    job = job_of("mine/plain.py", "mine/plain.py", "--data-dir", "data")
    run = Path(job.run)
    assert not run.exists()
    submit(job)
    assert job.command == (str(run / "code/plain.py"), "mine/plain.py", "--data-dir", "data")
    assert f"#SBATCH --chdir={here}\n" in (run / "job.sbatch").read_text()
    assert (run / "code" / "tiny.py").read_text() == RECIPE
    job = job_of("mine/tiny.py", "--config", "mine/how.toml", "--epochs", "3")
    words = ("train", f"{job.run}/code/tiny.py", "--config", f"{job.run}/code/how.toml")
    assert job.command[2:6] == words
    assert "--recipe-of-run" not in job.command
    assert job_of("mine/tiny.py", "--config=mine/how.toml").command[4].endswith("/code/how.toml")
    Path("away.toml").touch()
    assert job_of("mine/tiny.py", "--config", "away.toml").command[5] == "away.toml"


def test_a_recipe_imports_from_the_copy_of_the_folder_of_the_command(here):
    (here / "tiny.py").write_text(RECIPE)
    job = job_of("tiny.py")
    assert job.import_from == (f"{job.run}/code",)
    text = script_text(job)
    assert f"export PYTHONPATH={job.run}/code${{PYTHONPATH:+:$PYTHONPATH}}" in text
    assert re.search(r"python\S* -P -m samestep train", text)
    assert "PYTHONPATH" not in script_text(job_of("mine/plain.py"))


def test_a_run_goes_on_with_its_own_copy_and_its_imports(slurm, here):
    (here / "tiny.py").write_text(RECIPE)
    job = job_of("tiny.py", "--run-dir", "runs/one")
    submit(job)
    Path("runs/one/settings.toml").touch()  # it begins
    (here / "tiny.py").write_text(f"{RECIPE}# edited\n")
    for again in (job_of("runs/one"), job_of("tiny.py", "--run-dir", "runs/one")):
        assert again.code is None
        assert again.import_from == job.import_from
        assert str(here / "tiny.py") not in again.command
        submit(again)
    assert Path("runs/one/code/tiny.py").read_text() == RECIPE


def test_a_run_that_has_not_begun_gets_a_new_copy_unless_a_job_still_waits_for_the_old(slurm, here):
    run = here / "runs" / "one"
    submit(job_of("mine/tiny.py", "--run-dir", "runs/one"))
    Path("mine/tiny.py").write_text(f"{RECIPE}# edited\n")
    slurm.add(5, run, "PENDING")
    submit(job_of("mine/tiny.py", "--run-dir", "runs/one", after=("5:any",)))
    assert (run / "code" / "tiny.py").read_text() == RECIPE
    slurm.add(5, run, "FAILED")
    submit(job_of("mine/tiny.py", "--run-dir", "runs/one"))
    assert "# edited" in (run / "code" / "tiny.py").read_text()


def test_an_edit_is_allowed_once_without_a_copy_and_a_refused_job_leaves_none(
    slurm, here, tmp_path
):
    (slurm.folder / "sbatch").write_text("#!/bin/sh\necho no >&2; exit 1\n")
    with pytest.raises(UserError, match="no"):
        submit(job_of("mine/plain.py", nodes="1"))
    assert [*Path("runs").iterdir()] == []
    with pytest.raises(UserError, match=r"--allow-edit.*--no-snapshot"):
        JobOptions(allow_edit=True)
    keep_options(tmp_path, JobOptions(snapshot=False, allow_edit=True))
    kept = kept_options(tmp_path)
    assert (kept.snapshot, kept.allow_edit) == (False, False)


def test_without_a_copy_the_script_checks_the_files_at_each_start(slurm, here):
    job = job_of("mine/plain.py", snapshot=False)
    submit(job)
    run = Path(job.run)
    assert job.command == (str(here / "mine" / "plain.py"),)
    assert not (run / "code").exists()
    lines = (run / "job.sbatch").read_text()
    check = lines[lines.index("sha256sum") : lines.index("# The addresses")]
    check = f"run={shlex.quote(str(run))}\n{check}"
    assert subprocess.run(("bash", "-c", check), check=False).returncode == 0
    Path("mine/tiny.py").write_text("edited")  # beside it
    done = subprocess.run(("bash", "-c", check), check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert str(here / "mine" / "tiny.py") in done.stderr
    assert "sha256sum" not in script_text(job_of("mine/plain.py", snapshot=False, allow_edit=True))


def test_a_run_without_a_copy_goes_on_if_nothing_is_edited_or_the_edit_is_allowed(slurm, here):
    submit(job_of("mine/tiny.py", "--run-dir", "runs/one", snapshot=False))
    run = here / "runs" / "one"
    (run / "settings.toml").touch()  # it begins
    submit(job_of("runs/one", snapshot=False))
    Path("mine/tiny.py").write_text(f"{RECIPE}# edited\n")
    with pytest.raises(UserError, match=r"mine/tiny\.py .*--allow-edit"):
        submit(job_of("runs/one", snapshot=False))
    allowed = job_of("runs/one", snapshot=False, allow_edit=True)
    assert allowed.command[-2:] == ("--allow-change", "recipe")
    submit(allowed)
    submit(job_of("runs/one", snapshot=False))  # as it was accepted


@pytest.mark.parametrize("snapshot", [True, False])
def test_shellcheck_finds_nothing_in_a_script_with_a_copy_or_a_check(here, snapshot):
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed: apt install shellcheck")
    (here / "it's.py").write_text(RECIPE)
    text = script_text(job_of("it's.py", snapshot=snapshot)).encode()
    done = subprocess.run(("shellcheck", "-"), input=text, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b"")


def test_what_is_linked_is_mounted_in_a_container(here):
    subprocess.run(("git", "init", "-q", str(here)), check=True)
    (here / "image.sif").touch()
    found = find_workload("mine/tiny.py", ["--run-dir", str(here.parent / "run")], [])
    job = make_script(found, JobOptions(container=str(here / "image.sif")), here / "mine")
    assert job.mounts == (str(here.parent / "run"), str(here))


def test_submit_says_what_is_copied_and_that_a_run_goes_on_with_its_own(slurm, here, output_of):
    Path("tiny.py").write_text(tiny.RECIPE)
    Path("key.pem").touch()
    for said in (r"\b4 files, .*key\.pem", r" runs/one/code$"):
        shown = output_of("slurm", "submit", "tiny.py", "--", "--run-dir", "runs/one")
        assert re.search(f"^code .*{said}", shown, re.MULTILINE)
        Path("runs/one/settings.toml").write_text('recipe = "tiny.py"\n')
