"""What is tried before the first step changes nothing, and what fails later loses nothing."""

import torch
from torch import nn

import samestep
from samestep import read_records
from samestep.session import build
from samestep.training.dry_run import Tried
from samestep.training.prepare import place_loss
from tests import tiny
from tests.command_line import read_json, refusal

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


def test_a_training_is_equal_to_the_last_bit_after_a_dry_run(tmp_path, monkeypatch):
    recipe, calls = tiny.write_recipe(tmp_path, RESTLESS), []
    tiny.trained(recipe, tmp_path / "tried")

    def untried(_model, _loss, recipe, *_):
        calls.append(1)
        return Tried(recipe.metrics)

    monkeypatch.setattr(build, "dry_run", untried)
    tiny.trained(recipe, tmp_path / "not tried")
    assert calls
    tiny.assert_same_training(tmp_path / "tried", tmp_path / "not tried", tolerance=0)


# A metric that fails on some sample that is not among those that are tried.
BROKEN = tiny.RECIPE.replace(
    "    return outputs.argmax(dim=1) == targets",
    "    if pace.with_suffix('.broken').exists() and len(targets) < 5:\n"
    "        raise KeyError('lost')\n"
    "    return outputs.argmax(dim=1) == targets",
)


def test_an_evaluation_that_fails_on_two_ranks_loses_no_step(uninterrupted, tmp_path):
    recipe, folder = tiny.write_recipe(tmp_path, BROKEN), tmp_path / "run"
    recipe.with_suffix(".broken").touch()
    train = ("train", str(recipe), "--run-dir", str(folder), "--checkpoint-every-steps", "100")
    told = refusal(*train, world_size=2, folder=tmp_path / "output")
    assert "KeyError" in told
    assert "tiny.py:" in told
    assert tiny.newest_announced(folder) == tiny.STEPS_PER_EPOCH
    recipe.with_suffix(".broken").unlink()
    tiny.resumed(folder, "--checkpoint-every-steps", "4")
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
recipe = replace(recipe, loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0])))
"""


def test_what_a_loss_holds_is_where_the_model_is(tmp_path):
    run_dir = tmp_path / "run"
    tiny.trained(tiny.write_recipe(tmp_path, tiny.RECIPE + WEIGHTED), run_dir, "--epochs", "1")
    test = read_json(run_dir / "result.json")["test"]
    assert samestep.evaluate(run_dir)["loss"] == test["loss"]
    loss = nn.CrossEntropyLoss(weight=torch.ones(2))
    assert place_loss(loss, torch.device("meta"), torch.float64).weight.device.type == "meta"
    assert loss.weight.device.type == "cpu", "the recipe's own stays as it is"


EXTRA = """
from dataclasses import replace

class Counted(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.inner, self.calls = model(options), 0
    def forward(self, x):
        self.calls += self.training
        return self.inner(x) * (1 + self.calls / 1000)
    def get_extra_state(self):
        return {"calls": self.calls}
    def set_extra_state(self, state):
        self.calls = state["calls"]

recipe = replace(recipe, model=Counted)
"""


def test_a_module_with_extra_state_goes_on_from_it(tmp_path):
    recipe = tiny.write_recipe(tmp_path, tiny.RECIPE + EXTRA)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    tiny.trained(recipe, whole, "--max-steps", "22")
    tiny.trained(recipe, parts, "--max-steps", "13")
    tiny.resumed(parts, "--max-steps", "22")
    mine, its = tiny.last_state(parts)["model"], tiny.last_state(whole)["model"]
    assert mine["_extra_state"] == its["_extra_state"] == {"calls": 22}
    assert torch.equal(mine["inner.0.weight"], its["inner.0.weight"])
    losses = [[r["loss"] for r in read_records(p) if r["event"] == "step"] for p in (whole, parts)]
    assert losses[0] == losses[1]
