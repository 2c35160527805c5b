"""`samestep verify` as a user types it: its exit codes, its two outputs, and what it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import refusal, tree
from tests.verification import planted


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A working directory with a recipe that trains the same, and nothing else."""
    folder = tmp_path / "here"
    planted.write(folder, name="good.py")
    monkeypatch.chdir(folder)
    return folder


def run(here: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "samestep", "verify", *arguments],
        cwd=here,
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "80"},
    )


def test_one_json_object_is_all_of_standard_output_whatever_the_recipe_prints(here):
    recipe = planted.write(here, 'print("read")\n' + planted.DROPOUT + planted.PRINTS)
    before = tree(here)
    done = run(here, recipe.name, "--world-sizes", "1,2", "--json")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["same"] is False
    assert found["world_sizes"] == [1, 2]
    assert found["precisions"] == ["fp64", "fp32"]
    rows = {row["name"]: row for row in found["checks"]}
    assert [name for name, row in rows.items() if not row["passed"]] == ["dropout"]
    dropout = rows["dropout"]
    assert dropout["cause"] == "dropout"
    assert dropout["first_step"] == 1
    assert dropout["first_parameter"] == "0.weight"
    assert dropout["difference"] > dropout["tolerance"]
    assert "--accept dropout" in dropout["advice"]
    assert rows["one writer"]["status"] == "note"
    assert rows["lightning"]["status"] == "same"
    left = {path for path in tree(here) - before if "__pycache__" not in path.parts}
    assert not left, "a verification leaves no run and no file"


def test_the_table_fits_eighty_columns_and_ends_with_the_answer(here):
    done = run(here, "good.py", "--world-sizes", "1", "--batch-size", "6")
    assert done.returncode == 0, done.stdout + done.stderr
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    assert "of 6 samples" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("The same training.")


def test_a_forward_of_ones_own_is_no_reason_to_call_the_training_different(here):
    # What PyTorch caches when it is first needed is written below the user's line, not by it.
    recipe = planted.write(here, planted.OWN_FORWARD)
    done = run(here, recipe.name, "--world-sizes", "1,2", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {row["name"]: row for row in json.loads(done.stdout)["checks"]}["one writer"][
        "status"
    ] == "same"


def test_files_that_every_rank_writes_are_told_apart_from_another_training(here):
    text = planted.WRITES + 'open("notes.txt", "w").close()\n'
    done = run(here, planted.write(here, text).name, "--world-sizes", "1,2")
    assert done.returncode == 1, done.stderr
    assert "and 1 more file on every rank" in " ".join(done.stdout.split())
    assert done.stdout.splitlines()[-1].startswith("The same training, but every rank writes.")


def test_a_mistake_of_the_recipe_is_told_once_as_train_tells_it(here):
    text = "recipe = replace(recipe, metrics={'mean': lambda o, t: o.mean()})\n"
    done = run(here, planted.write(here, text).name)
    assert done.returncode == 2
    assert not done.stdout
    assert done.stderr.startswith("samestep: The recipe's metric 'mean' returned shape ()")
    assert "Traceback" not in done.stderr


def test_a_loss_that_is_no_number_is_told_without_checkpoints_that_never_were(here):
    text = """
def loss(outputs, targets):
    return outputs.sum() * float("nan")
recipe = replace(recipe, loss=loss)
"""
    done = run(here, planted.write(here, text).name)
    assert done.returncode == 2
    assert "The loss is NaN or infinite at step 1" in done.stderr
    assert "checkpoint" not in done.stderr


def test_too_few_samples_are_refused_with_the_number_that_is_needed(here):
    text = """
def few():
    x, y = data().train
    return Splits(train=(x[:5], y[:5]))
recipe = replace(recipe, data=few)
"""
    done = run(here, planted.write(here, text).name)
    assert done.returncode == 2
    assert "5 training samples are too few to compare 1, 2 and 3 ranks: 12 are needed" in (
        done.stderr
    )


REFUSED = {
    "no target": (["--json"], "Name what to verify before --json"),
    "unknown recipe": (["spirla"], "Did you mean 'spiral'?"),
    "missing file": (["nope.py"], "There is no file nope.py"),
    "unknown flag": (["good.py", "--world-size", "2"], "--world-sizes"),
    "sizes that are no numbers": (["good.py", "--world-sizes", "1,two"], "with commas"),
    "sizes in superscript": (["good.py", "--world-sizes", "²"], "with commas"),
    "no ranks": (["good.py", "--world-sizes", "0"], "from 1 to 64"),
    "too many ranks": (["good.py", "--world-sizes", "1000"], "from 1 to 64"),
    "nothing to accept": (["good.py", "--accept", "batchnrom"], "Did you mean 'batchnorm'?"),
    "negative tolerance": (["good.py", "--tolerance", "-1"], "it must be greater than 0"),
    "a flag without effect": (["good.py", "--epochs", "3"], "--epochs has no effect"),
    "a setting without effect": (["good.py", "--compile", "on"], "--compile has no effect"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_verified_is_refused_with_one_message(name, here, tmp_path):
    arguments, says = REFUSED[name]
    before = tree(here)
    assert says in refusal("verify", *arguments, folder=tmp_path / "output")
    assert {p for p in tree(here) - before if "__pycache__" not in p.parts} == set()


def test_ranks_that_something_else_started_are_refused(here, tmp_path):
    message = refusal("verify", "good.py", world_size=2, folder=tmp_path / "output")
    assert "has already started 2" in message


def test_a_recipe_cannot_accept_what_is_no_cause(here, tmp_path):
    recipe = planted.write(here, 'recipe = replace(recipe, accepts=("everything",))\n')
    message = refusal("verify", recipe.name, folder=tmp_path / "output")
    assert "'everything' is none of batchnorm, dropout" in message


def test_help_says_what_it_does_and_shows_examples(here):
    done = run(here, "--help")
    assert done.returncode == 0
    assert "exit codes: 0 the same training" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    done = run(here, "good.py", "--help")
    assert done.returncode == 0
    assert "--world-sizes" in done.stdout
    assert "samestep verify spiral" in done.stdout
