"""FSDP is the same training as DDP and as one process, tried with real ranks."""

from pathlib import Path

import pytest

from tests import tiny

pytestmark = pytest.mark.xdist_group("fsdp")

# Blocks that repeat, of which the ranks share out rows that they do not divide; 101 samples in
# batches of 12: no world size here divides the last batch of an epoch.
BLOCKS = """
import torch
from torch import nn
from samestep import Recipe, Splits

class Block(nn.Module):
    checkpoint_activations = True

    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(7), nn.Linear(7, 9)
        self.drop, self.outer = nn.Dropout(DROPOUT), nn.Linear(9, 7)

    def forward(self, x):
        return x + self.outer(self.drop(torch.tanh(self.inner(self.norm(x)))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 7)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.norm = nn.BatchNorm1d(7) if BATCHNORM else nn.LayerNorm(7)
        self.last = nn.Linear(7, 2)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(self.norm(x))

def model():
    made = Net()
    if FROZEN:
        made.blocks[1].inner.requires_grad_(False)
        made.first.weight.requires_grad_(False)
    return made

def data():
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(150, 8, generator=generator, dtype=torch.float64)
    y = (x[:, 0] * x[:, 1] > 0).long()
    return Splits(train=(x[:101], y[:101]), validation=(x[101:128], y[101:128]),
                  test=(x[128:], y[128:]))

recipe = Recipe(model=model, data=data, SHARD settings={
    "epochs": 2, "batch_size": 12, "lr": 0.01, "precision": "fp64", "log_every": 1,
    "pictures": False,
})
"""


def write_blocks(
    folder: Path,
    *,
    shard: str = "shard=(Block,),",
    dropout: float = 0.0,
    frozen: bool = False,
    batchnorm: bool = False,
) -> Path:
    text = BLOCKS.replace("SHARD", shard).replace("DROPOUT", str(dropout))
    text = text.replace("FROZEN", str(frozen)).replace("BATCHNORM", str(batchnorm))
    return tiny.write_recipe(folder, text, "blocks.py")


FSDP = ("--strategy", "fsdp")

HOW = {
    "adam": (),
    "sgd": ("--optimizer", "sgd", "--momentum", "0.9", "--lr", "0.1"),
    "clipped, averaged, accumulated": (
        *("--optimizer", "adamw", "--weight-decay", "0.1", "--clip-norm", "0.3", "--ema", "0.9"),
        *("--micro-batch-size", "2"),
    ),
    "kept gathered, recomputed": ("--no-reshard-after-forward", "--checkpoint-activations"),
}


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_fsdp_takes_the_steps_of_one_process(tmp_path, world_size):
    recipe = write_blocks(tmp_path)
    trainings = []
    for number, flags in enumerate(HOW.values()):
        own = ("--no-reshard-after-forward",)
        alone = tuple(flag for flag in flags if flag not in own)
        tiny.trained(recipe, tmp_path / f"one-{number}", *alone)
        trainings.append([recipe, "--run-dir", tmp_path / f"all-{number}", *FSDP, *flags])
    tiny.train_all(trainings, on=world_size, folder=tmp_path)
    for number in range(len(HOW)):
        tiny.assert_same_training(tmp_path / f"all-{number}", tmp_path / f"one-{number}")
