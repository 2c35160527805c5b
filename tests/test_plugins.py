"""An installed package brings recipes, trackers and verbs by its entry points."""

import json

import pytest

from tests.command_line import start

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
def record(client, entries): client.writelines(entry.event for entry in entries)
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
def command(tmp_path, monkeypatch):
    """Return a function that runs a command in a process that finds the package installed."""
    package, about = tmp_path / "lib/tiny_package", tmp_path / "lib/tiny_package-1.0.dist-info"
    for folder in (package, about):
        folder.mkdir(parents=True)
    (package / "all.py").write_text(TINY)
    (package / "broken.py").write_text("import no_such_module")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-package\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)

    monkeypatch.syspath_prepend(tmp_path / "lib")  # a rank gets this process's path and folder
    monkeypatch.chdir(tmp_path)

    def run(*words, code=0):
        where = {"PYTHONPATH": str(tmp_path / "lib")}  # for the tracker's own process
        ranks = start(*words, folder=tmp_path / "outputs", environment=where)
        assert ranks.wait() == [code], ranks.output()
        return ranks.output()

    return run


def test_a_package_brings_a_recipe_a_tracker_and_a_verb_or_is_named_if_broken(command, tmp_path):
    command("train", "tiny", "--track", "notes", "--run-dir", "run")
    assert json.loads((tmp_path / "run/result.json").read_text())["status"] == "completed"
    (seen,) = (tmp_path / "run").glob("**/seen")
    assert seen.read_text().endswith("completed")
    assert command("greet", "you", code=3) == "hello you\n"
    assert "greet        of the package tiny_package" in command("--help")
    broken = command("train", "broken", code=2)
    assert "tiny_package.broken, which cannot be imported" in broken
    assert "Traceback" not in broken
    unknown = command("train", "tin", code=2)
    assert "cifar10, cricket, images, mnist, spiral, broken, tiny" in unknown
