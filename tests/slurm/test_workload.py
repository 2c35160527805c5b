"""A recipe, a recipe file, a run directory or any script: each becomes the right command."""

from pathlib import Path

import pytest

from samestep.errors import UserError
from samestep.slurm.submission import Workload, find_workload

RECIPES = ["mnist", "spiral"]
RECIPE = "from samestep import Recipe\n\nrecipe = Recipe()\n"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def find(text: str, *arguments: str) -> Workload:
    return find_workload(text, list(arguments), RECIPES)


def test_a_recipes_name_becomes_a_training_in_a_new_run_directory(here):
    found = find("spiral", "--epochs", "5")
    assert (found.name, found.kind) == ("spiral", "recipe")
    assert found.run.parent == here / "runs"
    assert found.run.name.startswith("spiral-")
    words = ("-m", "samestep", "train", "spiral", "--epochs", "5", "--run-dir", str(found.run))
    assert found.command == (*words, "--resume")
    (here / "spiral").mkdir()  # a run directory of this name does not win
    (here / "spiral" / "settings.toml").touch()
    found = find("spiral")
    assert (found.run.parent, found.command[3]) == (here / "runs", "spiral")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (RECIPE, "recipe"),
        (RECIPE.replace("recipe =", "recipe: Recipe ="), "recipe"),
        (RECIPE + "raise SystemExit('it ran')\n", "recipe"),
        ("import samesteps\nrecipe = 1\n", "script"),
        ("import samestep\ndef f():\n    recipe = 1\n", "script"),
    ],
)
def test_a_file_that_assigns_recipe_is_trained_and_any_other_run(here, text, kind):
    Path("mine.py").write_text(text)
    words = () if kind == "recipe" else ("--nproc", "2", "--run-dir", "x", "--resume")
    found = find("mine.py", *words)
    assert (found.name, found.kind) == ("mine", kind)
    if kind == "recipe":
        assert found.command[:4] == ("-m", "samestep", "train", str(here / "mine.py"))
    else:
        assert found.command == (str(here / "mine.py"), *words)


def test_a_run_directory_goes_on_in_place(here):
    run = here / "runs" / "one"
    run.mkdir(parents=True)
    (run / "settings.toml").touch()
    found = find("runs/one", "--epochs", "9")
    assert (found.name, found.kind, found.run) == ("one", "recipe", run)
    assert find("runs/one", "--epochs", "9", "--resume").command == found.command
    rest = ("--epochs", "9", "--resume", "--recipe-of-run")  # its file may be edited by then
    assert found.command == ("-m", "samestep", "train", str(run), *rest)


@pytest.mark.parametrize(
    "words", [("--run-dir", "mine"), ("--run-dir=mine",), ("--run_dir", "mine")]
)
def test_a_run_directory_among_the_arguments_is_the_jobs(here, words):
    found = find("spiral", *words, "--epochs", "2")
    assert found.run == here / "mine"
    assert found.command[4:] == ("--epochs", "2", "--run-dir", str(here / "mine"), "--resume")


@pytest.mark.parametrize("words", [("--run-dir",), ("--run-dir=",), ("--run-dir", "")])
def test_a_run_directory_that_is_left_out_is_asked_for(words):
    with pytest.raises(UserError, match="--run-dir"):
        find("spiral", *words)


def test_nproc_and_a_file_that_does_not_exist_are_refused_with_what_there_is():
    for words in (("--nproc", "2"), ("--nproc=2",)):
        with pytest.raises(UserError, match="--ntasks-per-node"):
            find("spiral", *words)
    with pytest.raises(UserError, match=r"nowhere\.py.*mnist, spiral"):
        find("nowhere.py")


def test_a_run_that_has_not_begun_says_how_its_job_is_handed_in_again(here):
    (here / "my run").mkdir()
    with pytest.raises(UserError, match=r"my run has no settings\.toml.*continue\.$"):
        find("my run")
    (here / "my run" / "job.sbatch").touch()
    with pytest.raises(UserError, match=r"settings\.toml.* sbatch 'my run/job.sbatch'"):
        find("my run")


@pytest.mark.parametrize(
    ("name", "first"),
    [("job.sh", ""), ("job.sbatch", ""), ("job", "#!/bin/bash -l\n"), ("j.py", "#!/bin/env sh\n")],
)
def test_a_shell_script_is_told_from_python_with_what_to_do_instead(name, first):
    Path(name).write_text(f"{first}srun python train.py\n")
    with pytest.raises(UserError, match=f"{name} is a shell script.* sbatch {name}"):
        find(name)
    Path("mine.py").write_text("#!/usr/bin/env python3\nprint(1)\n")
    assert find("mine.py").kind == "script"


@pytest.mark.parametrize(
    ("content", "place"),
    [(b"\ndef :\n", r"mine\.py:2 "), (b"x = '\xff'\n", r"mine\.py "), (b"x\0", r"mine\.py ")],
)
def test_a_file_that_is_no_python_is_refused_with_its_line(content, place):
    Path("mine.py").write_bytes(content)
    with pytest.raises(UserError, match=place):
        find("mine.py")
