"""What a sweep counts and refuses, on a recipe of 131 samples, and what `--apply` writes."""

import re
import tomllib

import pytest

from samestep import UserError
from samestep.profiling.tried_values import apply_settings
from tests import tiny
from tests.command_line import read_json, start


def swept(folder, recipe, sizes, code=0):
    words = ("profile", str(tiny.write_recipe(folder, recipe)), "--batch-sizes", sizes)
    flags = ("--seconds", "0.2", "--run-dir", str(folder / "out"))
    ranks = start(*words, *flags, folder=folder / "o")
    assert ranks.wait() == [code], ranks.output()
    return read_json(folder / "out" / "profile.json")


def test_an_epochs_small_last_batch_counts_as_such_and_how_long_to_train_need_not_be_said(tmp_path):
    """A step of 100 samples is followed by one of 31: together they are 131, not 200."""
    recipe = tiny.RECIPE.replace('"epochs": 6', '"lr": 0.1')
    ((row,),) = (sweep["rows"] for sweep in swept(tmp_path, recipe, "100")["sweeps"])
    assert 31 <= row["samples_per_s"] * row["seconds"] <= 80


def test_batches_that_the_training_set_does_not_fill_are_refused_before_measuring(here, refused):
    path, out = str(tiny.write_recipe(here)), here / "out"
    said = refused("profile", path, "--batch-sizes", "2,132", "--run-dir", str(out))
    assert re.search(r"--batch-sizes: .*131 .*132", said)
    assert not out.exists()


STOPS_AT_4 = """
import os
import signal
from dataclasses import replace

without, sent = recipe.loss, []

def loss(outputs, targets):
    if len(outputs) == 4 and not sent:
        sent.append(os.kill(os.getpid(), signal.SIGTERM))
    return without(outputs, targets)

recipe = replace(recipe, loss=loss)
"""


def test_after_a_stop_signal_no_further_value_is_tried_and_what_there_is_is_shown(tmp_path):
    found = swept(tmp_path, tiny.RECIPE + STOPS_AT_4, "2,4,8", code=143)
    (sweep,) = found["sweeps"]
    assert [row["value"] for row in sweep["rows"]] == [2, 4]
    assert sweep["skipped"] == [8]
    assert found["measured"]["stopped"]


FILE = """\
# my settings
recipe = "mnist"
num_workers = 0   # none so far
batch-size = 32

[options]
num_workers = "an option may be called the same"
"""


def test_only_the_value_changes_and_what_is_not_there_is_added_above_the_tables(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text(FILE)
    apply_settings(path, {"num_workers": 4, "batch_size": 64}, "mnist")
    changed = FILE.replace("num_workers = 0 ", "num_workers = 4 ").replace("32", "64")
    assert path.read_text() == changed
    path.write_text("lr = 0.1\n\n[options]\nhidden = 3\n")
    apply_settings(path, {"num_workers": 2}, "mnist")
    assert path.read_text() == "lr = 0.1\nnum_workers = 2\n\n[options]\nhidden = 3\n"
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
