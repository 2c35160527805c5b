"""`--apply` changes its keys of a TOML file and nothing else in it."""

import tomllib

import pytest

from samestep import UserError
from samestep.profiling.sweep import apply_settings

FILE = """\
# my settings
recipe = "mnist"
num_workers = 0   # none so far
batch-size = 32

[options]
num_workers = "an option may be called the same"
"""


def test_only_the_value_changes_and_comments_stay(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text(FILE)
    apply_settings(path, {"num_workers": 4, "batch_size": 64}, "mnist")
    assert path.read_text() == FILE.replace("num_workers = 0 ", "num_workers = 4 ").replace(
        "32", "64"
    )


def test_a_key_that_is_not_there_is_added_above_the_tables(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("lr = 0.1\n\n[options]\nhidden = 3\n")
    apply_settings(path, {"num_workers": 2}, "mnist")
    assert path.read_text() == "lr = 0.1\nnum_workers = 2\n\n[options]\nhidden = 3\n"


def test_a_new_file_names_its_recipe(tmp_path):
    path = tmp_path / "new.toml"
    apply_settings(path, {"num_workers": 2}, "/a/my recipe.py")
    assert tomllib.loads(path.read_text()) == {"recipe": "/a/my recipe.py", "num_workers": 2}


@pytest.mark.parametrize("text", ["this is = not = toml\n", '"num_workers" = 1\n'])
def test_a_file_in_another_form_is_left_alone(text, tmp_path):
    path = tmp_path / "a.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=r"a\.toml"):
        apply_settings(path, {"num_workers": 2}, "mnist")
    assert path.read_text() == text
