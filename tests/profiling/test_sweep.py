"""What a sweep counts and refuses: the whole command on a recipe of 131 samples."""

import json
import re

import pytest

from tests import tiny
from tests.processes import samestep


def profile(folder, *flags, world_size=1):
    recipe = tiny.write_recipe(folder)
    return samestep(
        "profile",
        str(recipe),
        "--seconds",
        "0.2",
        *flags,
        "--run-dir",
        str(folder / "out"),
        world_size=world_size,
        folder=folder / "o",
    )


@pytest.mark.parametrize("world_size", [1, 2])
def test_samples_are_counted_so_that_an_epochs_small_last_batch_is_no_full_one(
    tmp_path, world_size
):
    """A step of 100 samples is followed by one of 31: together they are 131, not 200."""
    ranks = profile(tmp_path, "--batch-sizes", "100", world_size=world_size)
    assert ranks.wait() == [0] * world_size, ranks.output()
    (sweep,) = json.loads((tmp_path / "out" / "profile.json").read_text())["sweeps"]
    (row,) = sweep["rows"]
    assert 31 <= row["samples_per_s"] * row["seconds"] <= 80


@pytest.mark.parametrize("world_size", [1, 2])
def test_batches_that_the_training_set_does_not_fill_are_refused_before_measuring(
    tmp_path, world_size
):
    ranks = profile(tmp_path, "--batch-sizes", "2,132", world_size=world_size)
    assert ranks.wait() == [2] * world_size, ranks.output()
    assert re.search(r"--batch-sizes: .*131 .*132", ranks.printed(0))
    assert not (tmp_path / "out").exists()


def test_how_long_to_train_need_not_be_said(tmp_path):
    recipe = tiny.write_recipe(tmp_path)
    recipe.write_text(recipe.read_text().replace('"epochs": 6', '"lr": 0.1'))
    ranks = samestep(
        "profile",
        str(recipe),
        "--seconds",
        "0.2",
        "--run-dir",
        str(tmp_path / "out"),
        folder=tmp_path / "o",
    )
    assert ranks.wait() == [0], ranks.output()
    assert (tmp_path / "out" / "profile.json").is_file()


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
    recipe = tiny.write_recipe(tmp_path, tiny.RECIPE + STOPS_AT_4)
    flags = ("--seconds", "0.2", "--batch-sizes", "2,4,8,16", "--run-dir", str(tmp_path / "out"))
    ranks = samestep("profile", str(recipe), *flags, folder=tmp_path / "o")
    assert ranks.wait() == [143], ranks.output()
    found = json.loads((tmp_path / "out" / "profile.json").read_text())
    (sweep,) = found["sweeps"]
    assert [row["value"] for row in sweep["rows"]] == [2, 4]
    assert sweep["skipped"] == [8, 16]
    assert found["measured"]["stopped"]
