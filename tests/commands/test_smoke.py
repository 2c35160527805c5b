"""`--smoke` takes every part of a training once, says what works, and leaves nothing behind."""

import tempfile
from pathlib import Path

import pytest

from tests import tiny
from tests.command_line import call, run

PARTS = ["model", "training", "checkpoint", "resume", "training", "validation", "test", "all"]


def parts_of(printed: str) -> list[str]:
    return [line.split()[0] for line in printed.splitlines()]


def test_every_part_is_taken_and_nothing_stays(here, output_of, monkeypatch):
    Path("tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(here / "tmp"))
    recipe = tiny.write_recipe(here)
    before = sorted(here.rglob("*.*"))
    flags = ("--schedule", "cosine", "--warmup-steps", "20", "--patience", "2", "--track", "wandb")
    assert parts_of(output_of("train", recipe, "--smoke", *flags)) == PARTS
    assert [p for p in sorted(here.rglob("*.*")) if "pycache" not in str(p)] == before
    assert [*Path("tmp").glob("samestep*")] == []


TESTED = ("test=(x[n + 37:],", "test=(x[n + 37:, 1:],")
STREAM = ("train=(x[:n], y[:n]), validation=(x[n:n + 37], y[n:n + 37])", "train=[*zip(x, y)]")
COUNTS = (
    ("def loss(", "seen = [0]\ndef loss("),
    ("    time.sleep", "    seen[0] += 1\n    outputs = outputs * seen[0]\n    time.sleep"),
)
WRONG = {
    "in the test": ((TESTED,), PARTS[:6], "mat1 and mat2"),
    "in the resume": (COUNTS, PARTS[:3], "seen"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_work_is_told_after_what_does(here, capfd, name):
    changes, parts, says = WRONG[name]
    recipe = tiny.write_recipe(here, tiny.changed(tiny.RECIPE, *changes))
    assert call("train", str(recipe), "--smoke") == 2
    printed, told = capfd.readouterr()
    assert parts_of(printed) == parts
    assert says in told


@pytest.mark.slow
def test_ranks_do_it_together_and_a_recipe_without_validation_says_so(here):
    text = tiny.changed(tiny.RECIPE, STREAM, ("test=(x[n + 37:], y[n + 37:])", ""))
    ranks = run("train", str(tiny.write_recipe(here, text)), "--smoke", world_size=2, folder=here)
    assert parts_of(ranks.printed(0)) == [*PARTS[:5], "validation", "test", "all"]
    assert ranks.printed(0).count("none") == 2
