"""A DataLoader as a recipe's data: its samples, its collate, and the order of its sampler."""

import pytest
import torch
from torch import nn

from tests.tiny import assert_close, last_state, resumed, train_all, trained, write_recipe

RECIPE = """
import random, numpy as np, torch
from torch import nn
from torch.utils.data import *
from samestep import Recipe, Splits
x = torch.randn(67, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
y = (x[:, 0] > 0).long()
class Own(Sampler):
    def __init__(self): self.epoch, self.calls, self.drawn = 0, 0, random.Random(4)
    def set_epoch(self, epoch): self.epoch = epoch
    def __len__(self): return 40
    def __iter__(self):
        self.calls += 1
        return iter(np.random.default_rng((3, self.epoch)).permutation(67)[:40].tolist())
class Drawn(Own):
    def __iter__(self): return iter(self.drawn.sample(range(67), 40))
class Counted(Own):
    def __iter__(self):
        return iter(range(self.calls, self.calls + 10 + len([*super().__iter__()][:30])))
class Pairs(Own):
    def __iter__(self): return iter(np.reshape([*super().__iter__()], (-1, 4)).tolist())
class Uneven(Own):
    def __iter__(self): return iter([[1], [2, 3], [4]])
class Strangers(Own):
    def __iter__(self): return iter([67] * 40)
class Endless(Own):
    __len__ = None
    def __iter__(self): return iter(int, 1)
def doubled(samples): return torch.stack([x for x, _ in samples]) * 2, default_collate(samples)[1]
class Pages(BatchSampler):
    def __iter__(self): return super().__iter__()
    __iter__.__module__ = "torchdata.stateful_dataloader.sampler"
class Stateful(DataLoader):
    def __iter__(self): return super().__iter__()
    __iter__.__module__ = "torchdata.stateful_dataloader.stateful_dataloader"
def loader(**how):
    kind = Stateful if isinstance(how.get("batch_sampler"), Pages) else DataLoader
    return kind(TensorDataset(x, y), **{"collate_fn": doubled, **how})
TRAIN
def data():
    held_out = loader(batch_size=9, sampler=SubsetRandomSampler(range(0, 67, 3)))
    return Splits(train=train(), validation=held_out)
def model(): return nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2))
recipe = Recipe(model=model, data=data, settings={
    "epochs": 2, "batch_size": 8, "lr": 0.05, "optimizer": "sgd", "precision": "fp64",
    "log_every": 1, "checkpoint_every_steps": 3})
"""


def recipe_of(folder, sampler, *, batches=False):
    how = f"batch_sampler={sampler}" if batches else f"batch_size=8, sampler={sampler}"
    train = f"def train():\n    return loader({how})"
    return write_recipe(folder, RECIPE.replace("TRAIN", train), "loaded.py")


def by_a_plain_loop(recipe):
    """Return the weights after two epochs over the loader itself, in plain PyTorch."""
    made = {}
    exec(recipe.read_text(), made)
    torch.manual_seed(42)
    net = made["model"]().double()
    optimizer, loader = torch.optim.SGD(net.parameters(), lr=0.05), made["train"]()
    for epoch in range(2):
        sampler = loader.sampler if loader.batch_size else loader.batch_sampler
        getattr(sampler, "sampler", sampler).set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(inputs), targets).backward()
            optimizer.step()
    return net.state_dict()


@pytest.mark.parametrize("sampler", ["Own()", "Pairs()", "Pages(Own(), 8, False)"])
def test_a_loader_with_a_sampler_takes_the_steps_of_a_plain_loop_over_it(tmp_path, sampler):
    """To the last bit on one rank, torchdata's, too; batches stay together."""
    recipe, run = recipe_of(tmp_path, sampler, batches=sampler != "Own()"), tmp_path / "run"
    size = ["--batch-size", "4"] if sampler == "Pairs()" else []
    trained(recipe, run, *size)
    found, wanted = last_state(run)["model"], by_a_plain_loop(recipe)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


@pytest.mark.parametrize(
    "sampler",
    ["Drawn()", "WeightedRandomSampler(torch.arange(67.0), 40, generator=torch.Generator())"],
)
def test_an_order_that_is_drawn_is_that_of_seed_and_epoch(tmp_path, sampler):
    """On any number of ranks, and continued in the middle of an epoch."""
    recipe, whole, ranks = recipe_of(tmp_path, sampler), tmp_path / "whole", tmp_path / "ranks"
    trained(recipe, whole)
    train_all([[recipe, "--run-dir", ranks, "--max-steps", 8]], on=3, folder=tmp_path)
    resumed(ranks, "--max-steps", "10")
    ours, theirs = last_state(ranks), last_state(whole)
    assert ours["position"]["step"] == theirs["position"]["step"] == 10
    assert_close(ours["model"], theirs["model"], 1e-12)


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        ("Counted()", ["a different order each time"]),
        ("Endless()", ["has no end"]),
        ("Strangers()", ["67", "from 0 to 66"]),
        ("Uneven()", ["1 to 2 samples", "--batch-tokens"]),
        ("Pairs()", ["batches of 4", "--batch-size 4"]),
    ],
)
def test_a_sampler_that_is_no_function_of_seed_and_epoch_is_refused(
    tmp_path, refused, sampler, words
):
    batches = sampler in ("Uneven()", "Pairs()")
    recipe = recipe_of(tmp_path, sampler, batches=batches)
    size = ["--batch-size", "6"] if sampler == "Pairs()" else []
    message = refused("train", str(recipe), "--run-dir", str(tmp_path / "run"), *size)
    assert all(word in message for word in words), message


def test_the_settings_of_an_order_and_the_sampler_of_a_loader_exclude_each_other(tmp_path, refused):
    recipe = recipe_of(tmp_path, "Own()")
    assert "--order sequential" in refused("train", str(recipe), "--order", "sequential")
