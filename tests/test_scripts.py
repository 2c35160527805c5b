"""A Python file is told by its text: a recipe, a loop of its own, or neither. It is not run."""

import ast
from pathlib import Path

import pytest

from samestep.errors import UserError
from samestep.file_kinds import names_recipe
from samestep.recipe import find_recipe


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


LOOP = "def main():\n    with {}('runs/x') as run:\n        pass\nmain()\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (LOOP.format("samestep.open_run"), "line 4 .*torchrun"),
        (LOOP.format("open_run"), "line 4 .*torchrun"),
        ("", "samestep check"),
    ],
)
def test_a_loop_or_a_plain_script_is_not_run_to_find_that_it_has_no_recipe(text, told, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(f"import pathlib\npathlib.Path(r'{tmp_path}', 'ran').touch()\n{text}")
    with pytest.raises(UserError, match=rf"{told} .*{path.name}"):
        find_recipe(str(path))
    assert not Path(tmp_path, "ran").exists()


def test_a_recipe_beside_which_a_loop_is_written_stays_a_recipe(tmp_path):
    path = tmp_path / "both.py"
    path.write_text(
        "from samestep.recipes.spiral import recipe\ndef main():\n    import samestep\n"
        "    samestep.open_run('runs/x')\n"
    )
    assert find_recipe(str(path)).name == "both"
