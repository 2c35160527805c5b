"""`samestep verify` as a user types it: its exit codes, its two outputs, and what it refuses."""

import json
import re
from pathlib import Path

import pytest

from samestep.launch.ranks.start import run_ranks
from tests.command_line import call, one_message, tree
from tests.loops.scripts import EXAMPLES
from tests.verification import planted
from tests.verification.forked import _launch as launch


@pytest.fixture
def here(here) -> Path:
    """A working directory with a recipe that trains the same, and nothing else."""
    planted.write(here, name="good.py")
    return here


@pytest.fixture
def verify(tmp_path, monkeypatch, capfd):
    folder = tmp_path / "ranks"
    monkeypatch.setenv("COLUMNS", "80")

    def forked(num_ranks, words, task, elastic):
        if elastic is not None:  # a rank of these is killed, and the launcher lives on
            return run_ranks(num_ranks, words, task, elastic)
        return launch(words[1:], folder, num_ranks, Path(task))

    monkeypatch.setattr("samestep.launch.ranks.start.run_ranks", forked)

    def verified(*words: str) -> tuple[int, str, str]:
        code = call("verify", *words)
        assert not [file for file in folder.rglob("output-*.txt") if file.read_text()]
        return code, *capfd.readouterr()

    return verified


@pytest.mark.slow
def test_one_json_object_is_all_of_standard_output_whatever_the_recipe_prints(here, verify):
    # The forward is the user's own: what PyTorch caches below it is not the user's writing.
    recipe = planted.write(here, 'print("read")\n' + planted.FUNCTIONAL + planted.PRINTS)
    before = tree(here)
    code, printed, told = verify(recipe.name, "--world-sizes", "1,2", "--json")
    assert code == 1, told
    found = json.loads(printed)
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
    assert rows["a rank dies"]["status"] == "same"
    assert rows["a rank dies"]["compared"].endswith("2→1 ranks")
    assert rows["lightning"]["status"] == "same"
    assert not tree(here) - before, "a verification leaves no run and no file"


def test_the_table_fits_eighty_columns_and_ends_with_the_answer(here, verify):
    code, printed, told = verify("good.py", "--quick", "--batch-size", "6")
    assert code == 0, printed + told
    lines = printed.splitlines()
    assert max(map(len, lines)) <= 80
    assert "of 6 samples" in printed
    assert lines[-1].startswith("The same training, as far as --quick")
    assert "on 1 and 2 ranks" in printed, "--quick leaves out a third size"
    assert re.search(r"^skipped +stop and resume .* --quick *$", printed, re.MULTILINE)
    assert re.fullmatch(r"1 of 2 starts done: 1 rank, [\d.:]+( s)?\n", told)


def test_a_mistake_of_the_recipe_is_told_once_as_train_tells_it(here, verify, refused):
    text = "recipe = replace(recipe, metrics={'mean': lambda o, t: o.mean()})\n"
    code, printed, told = verify(planted.write(here, text).name)
    assert "'mean'" in one_message(code, printed + told)
    text = 'recipe = replace(recipe, accepts=("everything",))\n'
    message = refused("verify", planted.write(here, text, name="no_cause.py").name)
    assert re.search(r"'everything'.*batchnorm, dropout", message)


def test_a_script_with_a_loop_of_its_own_is_verified_with_its_arguments(here, verify):
    before = tree(here)
    script = str(EXAMPLES / "gan.py")
    flags = ("--world-sizes", "2", "--quick", "--json")
    code, printed, told = verify(script, *flags, "--", "--points", "777")
    assert code == 0, told
    found = json.loads(printed)
    assert (found["same"], found["recipe"], found["training_samples"]) == (True, "gan.py", 299)
    assert not tree(here) - before
