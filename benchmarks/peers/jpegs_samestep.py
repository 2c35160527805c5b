"""Read a folder of JPEGs as the recipe `images` does; no model is trained, as in `jpegs_plain`.

`--first` puts the first epoch on the clock, with the reading of every file that goes before it.
"""

import os
import sys
import tempfile
import time

# What an earlier row's scan found must not spare this one its own.
os.environ["XDG_CACHE_HOME"] = scratch = tempfile.mkdtemp(prefix="samestep-bench-")

import shutil

import torch
from common import measure, options, report

from samestep.core.data.recipe_data import load_splits, open_source
from samestep.core.recipe import find_recipe
from samestep.launch.ranks.world import World

BATCH_SIZE = 128

first = "--first" in sys.argv
cache = "memory" if "--memory" in sys.argv else "off"
sys.argv = [word for word in sys.argv if word not in ("--first", "--memory")]
asked = options()
recipe = find_recipe("images")
assert recipe.options is not None
chosen = recipe.complete_options(
    recipe.options(
        data_dir=str(asked.data_dir), cache=cache, validation_fraction=0.0, test_fraction=0.0
    )
)
start = time.perf_counter()
data = load_splits(recipe, chosen, World()).train
source = open_source(
    data,
    World(),
    seed=42,
    dtype=torch.float32,
    num_workers=asked.workers,
    transform=recipe.transform,
    augment=recipe.augment,
)


def train_epoch(epoch: int) -> int:
    blocks = source.blocks(epoch, 0, global_batch=BATCH_SIZE, drop_last=False)
    return sum(len(block.targets) for block in blocks)


if first:
    samples = train_epoch(0)
    report([0.0, time.perf_counter() - start], samples)
else:
    measure(train_epoch, asked.epochs)
shutil.rmtree(scratch)
