"""What is tried before the first step changes nothing, and what fails later loses nothing."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from samestep import read_records
from samestep.training.prepare import place_loss
from tests import tiny
from tests.command_line import call, read_json, refusal
from tests.processes import run_ranks

# All that a forward can change beside the weights, and all that it can draw from.
RESTLESS = """
import random
import numpy as np
import torch
from torch import nn
from samestep import Recipe, Splits

class Restless(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("calls", torch.zeros(()))
        self.seen, self.count = [], 0

    def forward(self, x):
        self.calls = self.calls + 1
        self.count += 1
        self.seen.append(len(x))
        noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
        scale = 1 + 0.01 * float(self.calls) + 0.001 * self.count + 0.0001 * len(self.seen)
        return self.last(self.drop(self.norm(self.first(x)))) * scale + 0.01 * noise

class Samples(torch.utils.data.Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        return self.x[i] + torch.rand(()) * random.random(), self.y[i]

def data():
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    return Splits(train=(x[:40], y[:40]), validation=Samples(x[40:], y[40:]))

recipe = Recipe(model=Restless, data=data,
                settings={"epochs": 2, "batch_size": 8, "log_every": 1})
"""


def _train_with_and_without(recipe: str, folder: Path) -> None:
    from samestep.cli import main
    from samestep.session import build
    from samestep.training.dry_run import Tried

    assert main(["train", recipe, "--run-dir", str(folder / "tried")]) == 0
    calls = []
    build.dry_run = lambda _model, _loss, recipe, *_: calls.append(1) or Tried(recipe.metrics)
    assert main(["train", recipe, "--run-dir", str(folder / "not tried")]) == 0
    assert calls


def test_a_training_is_equal_to_the_last_bit_whether_its_recipe_was_tried_or_not(tmp_path):
    recipe = tiny.write_recipe(tmp_path, RESTLESS)
    run_ranks(_train_with_and_without, 1, tmp_path / "output", str(recipe), tmp_path)
    tiny.assert_same_training(tmp_path / "tried", tmp_path / "not tried", tolerance=0)


RANDOM = """
import random
import torch
from torch import nn
from samestep import Recipe, Splits

class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x):
        return self.linear(x) + torch.randn(len(x), 2) + random.random()

def data():
    x = torch.randn(90, 4, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    return Splits(train=(x[:40], y[:40]), validation=(x[40:60], y[40:60]), test=(x[60:], y[60:]))

recipe = Recipe(model=Noisy, data=data, settings={"epochs": 2, "batch_size": 8})
"""


def evaluated(folder: Path, capfd) -> dict:
    capfd.readouterr()
    assert call("evaluate", str(folder), "--json") == 0
    return json.loads(capfd.readouterr().out)


def test_a_model_that_draws_is_evaluated_with_the_same_numbers_each_time(tmp_path, capfd):
    recipe, folder = tiny.write_recipe(tmp_path, RANDOM), tmp_path / "run"
    tiny.trained(recipe, folder)
    test = read_json(folder / "result.json")["test"]
    again = evaluated(folder, capfd)
    assert (again["loss"], again["accuracy"]) == (test["loss"], test["accuracy"])


# A metric that fails on some sample that is not among those that are tried.
BROKEN = tiny.RECIPE.replace(
    "    return outputs.argmax(dim=1) == targets",
    "    if pace.with_suffix('.broken').exists() and len(targets) < 5:\n"
    "        raise KeyError('lost')\n"
    "    return outputs.argmax(dim=1) == targets",
)


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_evaluation_that_fails_loses_no_step_that_was_trained(
    uninterrupted, tmp_path, world_size
):
    recipe, folder = tiny.write_recipe(tmp_path, BROKEN), tmp_path / "run"
    recipe.with_suffix(".broken").touch()
    train = ("train", str(recipe), "--run-dir", str(folder), "--checkpoint-every-steps", "100")
    told = refusal(*train, world_size=world_size, folder=tmp_path / "output")
    assert "KeyError" in told
    assert "tiny.py:" in told
    assert tiny.newest_announced(folder) == tiny.STEPS_PER_EPOCH
    recipe.with_suffix(".broken").unlink()
    tiny.resumed(folder, "--checkpoint-every-steps", "4", on=world_size)
    tiny.assert_same_training(folder, uninterrupted)


def test_an_evaluation_takes_the_training_s_micro_batch_or_what_is_asked_for(tmp_path):
    text = tiny.RECIPE.replace(
        "    return outputs.argmax(dim=1) == targets",
        "    with pace.with_suffix('.sizes').open('a') as file:\n"
        "        print(len(targets), file=file)\n"
        "    return outputs.argmax(dim=1) == targets",
    )
    recipe = tiny.write_recipe(tmp_path, text)
    sizes = recipe.with_suffix(".sizes")
    train = ("--max-steps", "11")
    tiny.trained(recipe, tmp_path / "own", *train)
    seen = " ".join(sizes.read_text().split())  # those of what is trained come between
    assert seen.startswith("8 ")
    assert " 12 12 12 1 " in seen
    sizes.unlink()
    tiny.trained(recipe, tmp_path / "asked", *train, "--eval-batch-size", "30")
    assert " 30 7 " in " ".join(sizes.read_text().split())


WEIGHTED = """
from dataclasses import replace
from tiny import recipe
from torch import nn, tensor
recipe = replace(recipe, loss=nn.CrossEntropyLoss(weight=tensor([1.0, 3.0])))
"""


def test_what_a_loss_holds_is_where_the_model_is(tmp_path, capfd):
    tiny.write_recipe(tmp_path)
    recipe = tiny.write_recipe(tmp_path, WEIGHTED, "weighted.py")
    run_dir = tmp_path / "run"
    tiny.trained(recipe, run_dir, "--epochs", "1")
    test = read_json(run_dir / "result.json")["test"]
    assert evaluated(run_dir, capfd)["loss"] == test["loss"]
    loss = nn.CrossEntropyLoss(weight=torch.ones(2))
    assert place_loss(loss, torch.device("meta"), torch.float64).weight.device.type == "meta"
    assert loss.weight.device.type == "cpu", "the recipe's own stays as it is"


EXTRA = """
from dataclasses import replace
from tiny import model as plain, recipe
from torch import nn

class Counted(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.calls = inner, 0
    def forward(self, x):
        self.calls += self.training
        return self.inner(x) * (1 + self.calls / 1000)
    def get_extra_state(self):
        return {"calls": self.calls}
    def set_extra_state(self, state):
        self.calls = state["calls"]

def model(options):
    return Counted(plain(options))

recipe = replace(recipe, model=model)
"""


def test_a_module_with_extra_state_goes_on_from_it(tmp_path):
    tiny.write_recipe(tmp_path)
    recipe = tiny.write_recipe(tmp_path, EXTRA, "extra.py")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    tiny.trained(recipe, whole, "--max-steps", "22")
    tiny.trained(recipe, parts, "--max-steps", "13")
    tiny.resumed(parts, "--max-steps", "22")
    mine, its = tiny.last_state(parts)["model"], tiny.last_state(whole)["model"]
    assert mine["_extra_state"] == its["_extra_state"] == {"calls": 22}
    assert torch.equal(mine["inner.0.weight"], its["inner.0.weight"])
    losses = [[r["loss"] for r in read_records(p) if r["event"] == "step"] for p in (whole, parts)]
    assert losses[0] == losses[1]
