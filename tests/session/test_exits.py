"""A recipe that calls exit() ends the run as a mistake, with its line, on any number of ranks."""

import pytest

from tests.command_line import RECIPE, read_json, refusal
from tests.tiny import all_records

DATA_SET = """class Exits(torch.utils.data.TensorDataset):
    def __getitem__(self, index):
        exit(4)

def data():
    return Splits(train=Exits(torch.ones(60, 4)))
"""
LOSS = """seen = []

def loss(outputs, targets):
    seen.append(1)
    if len(seen) == 9:
        raise SystemExit(3)
    return nn.functional.cross_entropy(outputs, targets)

recipe = Recipe(loss=loss, """


def edited(folder, old, new, line):
    """Write a recipe that calls exit; return it, and where."""
    text = RECIPE.replace(old, new)
    path = folder / "mine.py"
    path.write_text(text)
    return str(path), f"{path}:{text.splitlines().index(line) + 1}"


@pytest.mark.parametrize(
    ("new", "line"),
    [
        ("exit()\ndef data():", "exit()"),
        ("def data():\n    exit()", "    exit()"),
        (f"{DATA_SET}\ndef unused():", "        exit(4)"),
    ],
    ids=["file", "data()", "data set"],
)
def test_exit_in_a_recipe_is_a_mistake_that_names_the_line(tmp_path, new, line, refused):
    path, place = edited(tmp_path, "def data():", new, line)
    assert place in refused("train", path, "--run-dir", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_exit_in_the_loss_ends_all_ranks_with_one_message_and_the_run_as_failed(tmp_path):
    path, place = edited(tmp_path, "recipe = Recipe(", LOSS, "        raise SystemExit(3)")
    run = tmp_path / "run"
    command = ("train", path, "--run-dir", str(run))
    assert place in refusal(*command, world_size=2, folder=tmp_path / "output")
    assert all_records(run)[-1]["event"] == "stop"
    assert read_json(run / "result.json")["status"] == "failed"
