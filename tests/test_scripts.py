"""A Python file is told by its text: a recipe, a loop of its own, or neither. It is not run."""

import ast
from pathlib import Path

import pytest

from samestep.errors import UserError
from samestep.recipe import find_recipe
from samestep.recipe_source import names_recipe


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("recipe = Recipe()", True),
        ("recipe: Recipe = f()", True),
        ("from mine import recipe", True),
        ("from a import b as recipe", True),
        ("recipes = 1", False),
        ("def f():\n    recipe = 1", False),
        ("", False),
    ],
)
def test_a_recipe_is_told_by_what_the_file_ends_up_with(text, expected):
    assert names_recipe(ast.parse(text)) is expected


@pytest.mark.parametrize("call", ["samestep.open_run", "open_run"])
def test_a_loop_of_its_own_is_not_run_to_find_that_it_has_no_recipe(call, tmp_path):
    path = tmp_path / "loop.py"
    ran = f"import pathlib\npathlib.Path(r'{tmp_path}', 'ran').touch()\n"
    path.write_text(f"{ran}def main():\n    with {call}('runs/x') as run:\n        pass\nmain()\n")
    with pytest.raises(UserError, match=rf"line 4 .*torchrun .*{path.name}"):
        find_recipe(str(path))
    assert not Path(tmp_path, "ran").exists()


def test_a_plain_training_script_is_not_run_to_find_that_it_has_no_recipe(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(f"import pathlib\npathlib.Path(r'{tmp_path}', 'ran').touch()\n")
    with pytest.raises(UserError, match=rf"samestep check .*{path.name}"):
        find_recipe(str(path))
    assert not Path(tmp_path, "ran").exists()


def test_a_recipe_beside_which_a_loop_is_written_stays_a_recipe(tmp_path):
    path = tmp_path / "both.py"
    path.write_text(
        "from samestep.recipes.spiral import recipe\ndef main():\n    import samestep\n"
        "    samestep.open_run('runs/x')\n"
    )
    assert find_recipe(str(path)).name == "both"
