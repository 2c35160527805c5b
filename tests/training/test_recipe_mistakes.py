"""What a recipe gets wrong is refused before or at the first step, in words, with exit code 2."""

import pytest

from tests.processes import samestep

GOOD = {
    "model": "def model():\n    return nn.Linear(4, 2)",
    "targets": "(x[:, 0] > 0).long()",
    "data": "Splits(train=(x[:48], y[:48]), validation=(x[48:], y[48:]))",
    "more": "",
}
RECIPE = """
import torch
from torch import nn
from samestep import Recipe, Splits

{model}

def data():
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    y = {targets}
    return {data}

recipe = Recipe(model=model, data=data, settings={{"epochs": 1, "batch_size": 8}}{more})
"""


def run(folder, world_size=1, **wrong):
    path = folder / "mine.py"
    path.write_text(RECIPE.format(**{**GOOD, **wrong}))
    return samestep(
        "train",
        str(path),
        "--run-dir",
        str(folder / "run"),
        world_size=world_size,
        folder=folder / "output",
    )


MISTAKES = [
    ({"data": "(x, y)"}, "Splits("),
    ({"model": "model = nn.Linear(4, 2)"}, "function"),
    ({"model": "def model(hidden):\n    return nn.Linear(4, 2)"}, "model()"),
    ({"model": "def model():\n    return nn.ReLU()"}, "parameters"),
    ({"model": "def model():\n    return nn.Linear(5, 2)"}, "first batch"),
    ({"targets": "(x[:, 0] > 0).long() + 1"}, "first batch"),
    ({"targets": "x[:, 0]"}, "first batch"),
    ({"more": ", loss=nn.CrossEntropyLoss(reduction='none')"}, "scalar"),
    ({"more": ", metrics={'mean': lambda o, t: o.mean()}"}, "sample"),
]


@pytest.mark.parametrize(("wrong", "message"), MISTAKES)
def test_a_mistake_in_a_recipe_is_told_in_words(refused, tmp_path, wrong, message):
    (tmp_path / "mine.py").write_text(RECIPE.format(**{**GOOD, **wrong}))
    told = refused("train", str(tmp_path / "mine.py"), "--run-dir", str(tmp_path / "run"))
    assert message in told


# One of each place where ranks find it: the recipe's names, its data, its model, the first step.
@pytest.mark.parametrize(("wrong", "message"), [MISTAKES[n] for n in (0, 1, 3, 5, 8)])
def test_two_ranks_tell_of_a_mistake_as_one(tmp_path, wrong, message):
    ranks = run(tmp_path, 2, **wrong)
    assert [p.exitcode for p in ranks.processes] == [2, 2], ranks.output()
    assert message in ranks.printed(0)
    assert "Traceback" not in ranks.output()


def test_the_good_recipe_that_these_mistakes_are_planted_in_trains(tmp_path):
    ranks = run(tmp_path)
    assert [p.exitcode for p in ranks.processes] == [0], ranks.output()


def test_data_drawn_from_numpy_and_random_is_the_same_on_every_rank(tmp_path):
    model = """
import random
import numpy as np

def drawn(x):
    y = torch.tensor(np.random.rand(64)) > random.random()
    print("drawn", "".join(str(int(v)) for v in y))
    return y.long()
"""
    ranks = run(tmp_path, 2, targets="drawn(x)", model=model + GOOD["model"])
    assert [p.exitcode for p in ranks.processes] == [0, 0], ranks.output()
    shown = ranks.printed(0), (tmp_path / "run" / "rank-1.log").read_text()
    first, second = ([w for w in text.splitlines() if w.startswith("drawn")] for text in shown)
    assert first
    assert first == second


def test_steps_due_at_the_end_of_an_epoch_are_not_forgotten(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(RECIPE.format(**GOOD))
    ranks = samestep(
        "train",
        str(path),
        "--run-dir",
        str(tmp_path / "run"),
        "--epochs",
        "4",
        "--checkpoint-every-steps",
        "6",
        "--checkpoint-every-epochs",
        "100",
        "--eval-every-steps",
        "6",
        "--eval-every-epochs",
        "100",
        folder=tmp_path / "output",
    )
    assert [p.exitcode for p in ranks.processes] == [0], ranks.output()
    names = {p.name for p in (tmp_path / "run" / "checkpoints").glob("*.pt")}
    assert names == {f"checkpoint_epoch_{n}.pt" for n in (1, 2, 3, 4)}
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert events.count('"split": "validation"') == 4
