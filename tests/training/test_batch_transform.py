"""A transform of the whole batch, as mixup is, gives the same training on any number of ranks."""

import re

import pytest

from tests import tiny

RECIPE = """
import random
import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset
from samestep import Recipe, Splits
x = torch.randn(180, 6, generator=torch.Generator().manual_seed(3))
y = (x[:, 0] * x[:, 1] > 0).long()
class Rows(Dataset):
    def __len__(self): return 131
    def __getitem__(self, index): return {"x": x[index], "y": y[index]}
class Stream(IterableDataset):
    def __iter__(self): return ((x[n], y[n]) for n in range(131))
def data(): return Splits(train=(x[:131], y[:131]), validation=(x[131:], y[131:]))
def mixup(inputs, targets):
    assert len(inputs) == len(targets) in (12, 11)
    wanted = nn.functional.one_hot(targets, 2).float()
    share, other = np.random.beta(0.4, 0.4), torch.randperm(len(inputs))
    inputs.mul_(share).add_((1 - share) * inputs[other])
    inputs[:, random.randrange(6)] = 0
    return inputs, share * wanted + (1 - share) * wanted[other]
def of_batch(batch):
    inputs, wanted = mixup(batch["x"], batch["y"])
    return {"x": inputs, "y": wanted}
def model():
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 2))
def loss(outputs, targets):
    assert targets.dtype == outputs.dtype and targets.shape == outputs.shape
    return nn.functional.cross_entropy(outputs, targets)
HOW = {"data": data, "batch_transform": mixup}
recipe = Recipe(
    model=model, loss=loss, evaluation_loss=nn.functional.cross_entropy, **HOW,
    settings={"epochs": 2, "batch_size": 12, "lr": 0.02, "log_every": 1},
)
"""
PLAIN = ("nn.BatchNorm1d(16), nn.Dropout(0.2)", "nn.Tanh()")
COLLATED = (
    'HOW = {"data": data, "batch_transform": mixup}',
    """of = lambda outputs, batch: loss(outputs, batch["y"])
judge = lambda outputs, batch: nn.functional.cross_entropy(outputs, batch["y"])
def data(): return Splits(train=Rows(), validation=Rows())
HOW = {"data": data, "batch_transform": of_batch, "metrics": {}, "loss": of,
       "collate": torch.utils.data.default_collate, "evaluation_loss": judge,
       "forward": lambda model, batch: model(batch["x"])}""",
)
ONCE = ("loss=loss, evaluation_loss=nn.functional.cross_entropy, **HOW", "**HOW")
STREAM = ("train=(x[:131], y[:131])", "train=Stream()")
FP64 = ("--precision", "fp64")
VIRTUAL = ("--virtual-ranks", "5")
SLOW = pytest.mark.slow


def written(folder, name, *changes):
    return tiny.write_recipe(folder, tiny.changed(RECIPE, *changes), f"{name}.py")


TRAININGS = {
    "memory": ((PLAIN,), FP64, ("--micro-batch-size", "2")),
    "virtual": ((), VIRTUAL, ()),
    "collated": ((PLAIN, COLLATED, ONCE), FP64, ("--micro-batch-size", "3")),
    "stream": ((PLAIN, STREAM), FP64, ()),
    "virtual, collated": ((COLLATED, ONCE), VIRTUAL, ()),
}


@pytest.mark.parametrize("names", [(*TRAININGS,)[:2], pytest.param((*TRAININGS,)[2:], marks=SLOW)])
def test_mixed_batches_are_those_of_one_process_on_any_ranks_and_after_a_resume(tmp_path, names):
    """Every rank sees the whole batch; with virtual ranks all is equal to the last bit."""
    words = []
    for name in names:
        changes, flags, more = TRAININGS[name]
        recipe = written(tmp_path, name.replace(", ", "_"), *changes)
        tiny.trained(recipe, tmp_path / f"{name}-1", *flags)
        begun = [recipe, "--run-dir", tmp_path / f"{name}-3", *flags, *more, "--max-steps", "11"]
        words += [begun, [tmp_path / f"{name}-3", "--resume", "--max-steps", "22"]]
    tiny.train_all(words, on=3, folder=tmp_path)
    for name in names:
        tolerance = 0 if "virtual" in name else 1e-11
        tiny.assert_same_training(tmp_path / f"{name}-3", tmp_path / f"{name}-1", tolerance)
    first = tmp_path / f"{names[0]}-1"
    assert not any("metrics" in record for record in tiny.events(first, "epoch"))
    assert all(record["loss"] > 0 for record in tiny.events(first, "evaluation"))


MISTAKES = {
    "fails": ("inputs.mul_(share)", "inputs.mul(share, 3)", "batch_transform failed.*TypeError"),
    "no pair": ("return inputs, share", "return share", "batch_transform.*a pair"),
    "fewer rows": (
        "return inputs, share",
        "return inputs[1:], share",
        "batch_transform.*12 samples",
    ),
    "no function": ('"batch_transform": mixup', '"batch_transform": 3', "batch_transform"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_it_may_not_return_is_told_in_one_message(name, tmp_path, refused):
    old, new, says = MISTAKES[name]
    recipe = written(tmp_path, "mistake", (old, new))
    assert re.search(says, refused("train", str(recipe), "--run-dir", str(tmp_path / "run")))
