"""`samestep verify` as a user types it: its exit codes, its two outputs, and what it refuses."""

import json
import re
from pathlib import Path

import pytest

from samestep.commands.verify import _verify
from samestep.errors import UserError
from tests.command_line import call, refusal, tree, typed
from tests.session.scripts import EXAMPLES
from tests.verification import planted


@pytest.fixture
def here(here) -> Path:
    """A working directory with a recipe that trains the same, and nothing else."""
    planted.write(here, name="good.py")
    return here


def run(here: Path, *arguments: str):
    return typed("-m", "samestep", "verify", *arguments, folder=here, COLUMNS="80")


@pytest.mark.slow
def test_one_json_object_is_all_of_standard_output_whatever_the_recipe_prints(here):
    # The forward is the user's own: what PyTorch caches below it is not the user's writing.
    recipe = planted.write(here, 'print("read")\n' + planted.FUNCTIONAL + planted.PRINTS)
    before = tree(here)
    done = run(here, recipe.name, "--world-sizes", "1,2", "--json")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["same"] is False
    assert found["world_sizes"] == [1, 2]
    assert found["precisions"] == ["fp64", "fp32"]
    assert found["held_still"] == ["dropout"]
    rows = {row["name"]: row for row in found["checks"]}
    assert [name for name, row in rows.items() if not row["passed"]] == ["dropout"]
    dropout = rows["dropout"]
    assert dropout["cause"] == "dropout"
    assert dropout["first_step"] == 1
    assert dropout["first_parameter"] == "line.weight"
    assert dropout["difference"] > dropout["tolerance"]
    assert "--accept dropout" in dropout["advice"]
    assert rows["one writer"]["status"] == "note"
    assert rows["lightning"]["status"] == "same"
    assert not tree(here) - before, "a verification leaves no run and no file"


def test_the_table_fits_eighty_columns_and_ends_with_the_answer(here):
    done = run(here, "good.py", "--quick", "--batch-size", "6")
    assert done.returncode == 0, done.stdout + done.stderr
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    assert "of 6 samples" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("The same training, as far as --quick")
    assert "on 1 and 2 ranks" in done.stdout, "--quick leaves out a third size"
    assert re.search(r"^skipped +stop and resume .* --quick *$", done.stdout, re.MULTILINE)
    assert re.fullmatch(r"1 of 2 starts done: 1 rank, \d+ s\n", done.stderr)


def test_a_mistake_of_the_recipe_is_told_once_as_train_tells_it(here, refused):
    text = "recipe = replace(recipe, metrics={'mean': lambda o, t: o.mean()})\n"
    assert "'mean'" in refused("verify", planted.write(here, text).name)


# What is wrong → the arguments, and what of them the one message names.
REFUSED = {
    "no target": (["--json"], "--json"),
    "unknown recipe": (["spirla"], "'spiral'"),
    "missing file": (["nope.py"], "nope.py"),
    "sizes that are no numbers": (["good.py", "--world-sizes", "1,two"], "1,two"),
    "sizes in superscript": (["good.py", "--world-sizes", "²"], "²"),
    "no ranks": (["good.py", "--world-sizes", "0"], "1 to 64"),
    "too many ranks": (["good.py", "--world-sizes", "1000"], "1 to 64"),
    "nothing to accept": (["good.py", "--accept", "batchnrom"], "'batchnorm'"),
    "negative tolerance": (["good.py", "--tolerance", "-1"], "-1"),
    "a flag without effect": (["good.py", "--epochs", "3"], "--epochs"),
    "a setting without effect": (["good.py", "--compile", "on"], "--compile"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_verified_is_refused_with_one_message(name, here):
    arguments, named = REFUSED[name]
    before = tree(here)
    with pytest.raises(UserError, match=re.escape(named)):
        _verify(arguments)
    assert tree(here) == before


@pytest.mark.slow
def test_a_script_with_a_loop_of_its_own_is_verified_with_its_arguments(here):
    before = tree(here)
    script = EXAMPLES / "gan.py"
    done = run(here, script, "--world-sizes", "2", "--quick", "--json", "--", "--points", "777")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["same"], found["recipe"], found["training_samples"]) == (True, "gan.py", 299)
    assert found["world_sizes"] == [1, 2]
    assert not tree(here) - before


def test_a_flag_of_the_script_before_the_dashes_is_told_to_follow_them(here):
    script = str(EXAMPLES / "gan.py")
    with pytest.raises(UserError, match=r"--points .* -- "):
        _verify([script, "--points", "777"])


def test_an_unknown_flag_is_refused_with_the_nearest_one_and_exit_code_2(here, refused):
    assert "--world-sizes" in refused("verify", "good.py", "--world-size", "2")


def test_ranks_that_something_else_started_are_refused(here, tmp_path):
    message = refusal("verify", "good.py", world_size=2, folder=tmp_path / "output")
    assert re.search(r"\b2\b", message)


def test_a_recipe_cannot_accept_what_is_no_cause(here):
    recipe = planted.write(here, 'recipe = replace(recipe, accepts=("everything",))\n')
    with pytest.raises(UserError, match=r"'everything'.*batchnorm, dropout"):
        _verify([recipe.name])


def test_help_says_what_it_does_and_shows_examples(here, capsys):
    with pytest.raises(SystemExit) as ended:
        _verify(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "samestep verify TARGET [flags]" in text
    assert max(len(line) for line in text.splitlines()) <= 80
    assert call("verify", "good.py", "--help") == 0
    assert "--world-sizes" in capsys.readouterr().out
