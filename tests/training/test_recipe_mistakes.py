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


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"data": "(x, y)"}, "must be Splits("),
        ({"model": "model = nn.Linear(4, 2)"}, "takes a function"),
        ({"model": "def model(hidden):\n    return nn.Linear(4, 2)"}, "model() failed"),
        ({"model": "def model():\n    return nn.ReLU()"}, "with parameters to train"),
        ({"model": "def model():\n    return nn.Linear(5, 2)"}, "failed on the first batch"),
        ({"targets": "(x[:, 0] > 0).long() + 1"}, "failed on the first batch"),
        ({"targets": "x[:, 0]"}, "failed on the first batch"),
        ({"more": ", loss=nn.CrossEntropyLoss(reduction='none')"}, "it must be a scalar"),
        ({"more": ", metrics={'mean': lambda o, t: o.mean()}"}, "one value a sample"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_a_mistake_in_a_recipe_is_told_in_words(tmp_path, world_size, wrong, message):
    ranks = run(tmp_path, world_size, **wrong)
    assert [p.exitcode for p in ranks.processes] == [2] * world_size, ranks.output()
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
