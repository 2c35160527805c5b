"""What a rank of the tests does with image files; it is imported by the processes themselves."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from samestep import UserError
from samestep.core.data.images.dataset import PREFIX, ImageFiles
from samestep.core.data.images.image_files import class_names, find_files
from samestep.core.data.recipe_data import open_source
from samestep.core.recipes.images import augment, normalise
from samestep.launch.ranks.world import World, find_world, join, leave

SEED = 11


def ready(root: Path, world: World, *, cache: str, side: int = 20, max_corrupt: float = 0.5):
    """Return the splits of a folder, ready on these ranks."""
    classes = class_names(root)
    found = {name: find_files(root, name, classes) for name in ("train", "validation", "test")}
    files = {
        name: ImageFiles(part, side, cache=cache, max_corrupt=max_corrupt)
        for name, part in found.items()
        if part
    }
    done = files["train"].prepare_on_ranks(files, world)
    return SimpleNamespace(splits=done, notes=done["notes"], left_out=done["left_out"])


def batches(data, world: World, *, epochs=(0, 1), global_batch=5, num_workers=0):
    """Return this rank's rows of some epochs, as the model sees them, and of an evaluation."""
    how = {"num_workers": num_workers, "transform": normalise, "augment": augment}
    source = open_source(data, world, seed=SEED, dtype=torch.float32, **how)
    rows = []
    for epoch in epochs:
        for block in source.blocks(epoch, 0, global_batch=global_batch, drop_last=False):
            for part in block.singles():
                step = (epoch, part.first_step)
                if part.weight:
                    rows += [(step, x, int(y)) for x, y in zip(part.inputs, part.targets)]  # noqa: B905
    for inputs, targets, *_ in source.evaluation(4):
        rows += [((-1, 0), x, int(y)) for x, y in zip(inputs, targets)]  # noqa: B905
    return rows


def on_two_ranks(root: Path, others: list[Path], kinds: dict[int, tuple[str, int]]):
    """Return what a rank reads for each kind, what it is refused, and what of memory it shares."""
    world = find_world("cpu")
    join(world, timeout_s=60)
    read = {}
    for side, (cache, num_workers) in kinds.items():
        found = ready(root, world, cache=cache, side=side)
        rows = batches(found.splits["train"], world, num_workers=num_workers)
        read[side] = rows, found.left_out
    broken = [refusal(root, world, cache=cache, max_corrupt=0.1) for cache in ("memory", "off")]
    other = [refusal((root, path)[world.rank], world, cache="off") for path in others]
    shared = shares_one_memory(root, world)
    leave(world)
    return SimpleNamespace(read=read, broken=broken, other=other, shared=shared)


def refusal(root: Path, world: World, **how):
    """Return the message of what cannot be made ready, and whether all ranks have it."""
    try:
        ready(root, world, **how)
    except UserError as error:
        return str(error), error.on_all_ranks
    return None


def shares_one_memory(root: Path, world: World):
    """Write into one rank's images and look at another's; return what it sees, and where."""
    images, _labels = ready(root, world, cache="memory").splits["train"]
    world.barrier()
    if world.rank == 0:
        images[0] = 77
    world.barrier()
    maps = Path("/proc/self/maps").read_text()
    return np.unique(images[0]).tolist(), [line for line in maps.splitlines() if PREFIX in line]
