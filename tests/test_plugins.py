"""An installed package brings recipes, trackers and verbs by its entry points."""

import json
import os
import subprocess
import sys

import pytest

TINY = """\
import torch
from samestep import Recipe, Splits

recipe = Recipe(
    model=lambda: torch.nn.Linear(1, 1),
    data=lambda: Splits(train=(torch.ones(8, 1), torch.ones(8, 1))),
    loss=torch.nn.functional.mse_loss,
    settings={"epochs": 1, "batch_size": 4},
)

def main(words):
    print("hello", *words)
    return 3

def start(run):
    from samestep.show.tracking import Started
    return Started(client=(run.folder / "seen").open("w"))

def record(client, entries):
    client.writelines(entry.event for entry in entries)

def finish(client, result):
    client.write(result.status)
    client.close()
"""
ENTRY_POINTS = """\
[samestep.recipes]
tiny = tiny_package.all:recipe
spiral = tiny_package.all:recipe
broken = tiny_package.broken

[samestep.trackers]
notes = tiny_package.all

[samestep.verbs]
greet = tiny_package.all
"""


@pytest.fixture
def command(tmp_path):
    """Return a function that types a command where the package is installed."""
    package, about = tmp_path / "lib/tiny_package", tmp_path / "lib/tiny_package-1.0.dist-info"
    for folder in (package, about):
        folder.mkdir(parents=True)
    (package / "all.py").write_text(TINY)
    (package / "broken.py").write_text("import no_such_module")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-package\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)

    def run(*words):
        env = os.environ | {"PYTHONPATH": str(tmp_path / "lib")}
        words = [sys.executable, "-m", "samestep", *words]
        return subprocess.run(
            words, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )

    return run


@pytest.mark.slow
def test_a_package_brings_a_recipe_a_tracker_and_a_verb_or_is_named_if_broken(command, tmp_path):
    trained = command("train", "tiny", "--track", "notes", "--run-dir", "run")
    assert trained.returncode == 0, trained.stderr
    assert json.loads((tmp_path / "run/result.json").read_text())["status"] == "completed"
    (seen,) = (tmp_path / "run").glob("**/seen")
    assert seen.read_text().endswith("completed")
    greeted = command("greet", "you")
    assert (greeted.returncode, greeted.stdout) == (3, "hello you\n")
    assert "greet        of the package tiny_package" in command("--help").stdout
    broken = command("train", "broken")
    assert broken.returncode == 2
    assert "tiny_package.broken, which cannot be imported" in broken.stderr
    assert "Traceback" not in broken.stderr
    unknown = command("train", "tin")
    assert "cifar10, cricket, images, mnist, spiral, broken, tiny" in unknown.stderr
