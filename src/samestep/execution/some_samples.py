"""Some samples of a split as they are stored, and what the model says of them, on one rank."""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from samestep.data.batches import open_split
from samestep.data.keyed_random import mix
from samestep.data.loader_source import seed_reading
from samestep.data.stream_lanes import is_stream
from samestep.execution.shown import RowsOfFiles
from samestep.ranks.world import World
from samestep.recipe import Recipe
from samestep.settings import Settings
from samestep.training.apply import applied
from samestep.training.device import data_dtype
from samestep.training.evaluation import outputs_of

_MOST_PER_BATCH = 64
"""A model that takes long is asked of few samples."""


@dataclass(frozen=True)
class Some:
    """Samples of a split."""

    data: Any
    """Inputs and targets in memory, or a data set."""
    of: int | None
    """How many the split has; None of a stream."""
    places: tuple[int, ...] = ()
    """Where each of them is in the split; nothing of a stream."""

    def __len__(self) -> int:
        return len(self.data[0]) if isinstance(self.data, tuple) else len(self.data)

    def __getitem__(self, place: int) -> Any:
        """Return a sample as it is stored."""
        if isinstance(self.data, tuple):
            return self.data[0][place], self.data[1][place]
        return self.data[place]


def some_of(data: Any, count: int, seed: int, until: float) -> Some:
    """Return some samples of a split: by chance, so that sorted data shows all of its classes.

    Args:
        data: the split.
        count: how many to take at most.
        seed: of the choice; of what a data set draws, too.
        until: when to stop reading, by `time.monotonic`; one sample is always read.
    """
    if type(data) is TensorDataset and len(data.tensors) == 2:
        data = (data.tensors[0], data.tensors[1])
    if is_stream(data):
        seed_reading(mix(seed, 0))
        samples = list(_until(islice(iter(data), count), until))
        return Some(RowsOfFiles(samples), None)
    total = len(data[0]) if isinstance(data, tuple) else len(data)
    places = random.Random(seed).sample(range(total), min(count, total))  # noqa: S311 - pictures
    if isinstance(data, tuple):
        inputs, targets = data
        places.sort()
        index = torch.tensor(places, device=inputs.device)
        return Some((inputs[index], targets[index.to(targets.device)]), total, tuple(places))

    def read() -> Iterator[Any]:
        for place in places:
            seed_reading(mix(seed, 0, place))
            yield data[place]

    samples = list(_until(read(), until))
    return Some(RowsOfFiles(samples), total, tuple(places[: len(samples)]))


def _until(samples: Iterator[Any], until: float) -> Iterator[Any]:
    for sample in samples:
        yield sample
        if time.monotonic() > until:
            return


def ask(
    model: torch.nn.Module,
    some: Some,
    recipe: Recipe,
    settings: Settings,
    device: torch.device,
    batch_size: int,
    until: float,
) -> Iterator[tuple[Any, Any, int]]:
    """Yield outputs, targets (with `forward` the batch) and their number, batch by batch.

    It ends after the batch that `until` lies in, by `time.monotonic`.
    """
    settings = replace(settings, num_workers=0)
    plain = replace(recipe, augment=None)
    world, dtype = World(device=device), data_dtype(settings.precision)
    source, takes = open_split(some.data, world, plain, settings, dtype), applied(model, recipe)
    for batch in source.evaluation(min(batch_size, _MOST_PER_BATCH)):
        yield (
            outputs_of(takes, batch.inputs, settings.precision, device),
            batch.targets,
            batch.samples,
        )
        if time.monotonic() > until:
            return


def ask_whole(asked: Iterator[tuple[Any, Any, int]]) -> tuple[Tensor, Tensor] | None:
    """Return outputs and targets of all batches on the CPU; None if they are no plain tensors."""
    outputs, targets = [], []
    for output, target, count in asked:
        both = (output, target)
        if not all(isinstance(one, Tensor) and one.dim() and len(one) == count for one in both):
            return None
        outputs.append(output.detach().cpu())
        targets.append(target.detach().cpu())
    return (torch.cat(outputs), torch.cat(targets)) if outputs else None
