"""Open a data set as a source of batches: from memory, or through a DataLoader."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from samestep.base.errors import UserError, defined_at, made_by
from samestep.base.settings import Settings
from samestep.core.data.blocks import Lap, untimed
from samestep.core.data.loaders import Unpacked
from samestep.core.data.memory_source import MemorySource
from samestep.core.data.order import SHUFFLED, ordering_of
from samestep.core.data.source import ReadOptions, Source
from samestep.core.recipe import InMemory, Recipe
from samestep.core.recipe_checks import shown
from samestep.launch.ranks.world import World

_EVALUATED_TOGETHER = 32
"""Samples of a batch over which an evaluation makes a loss, where no setting says how many."""


def is_stream(data: Any) -> bool:
    """Whether data is read from its beginning on, not by index; a DataLoader gives no samples."""
    if isinstance(data, IterableDataset):
        return True
    if isinstance(data, DataLoader):
        return False
    return hasattr(data, "__iter__") and not hasattr(data, "__getitem__")


def open_source(
    data: InMemory | Dataset[Any], world: World, *, num_workers: int, **how: Any
) -> Source:
    """Return the source that suits a data set: memory for tensors, a stream, else a DataLoader.

    `num_workers` processes read a data set; the other arguments are those of `ReadOptions`.
    """
    reading = ReadOptions(world=world, **how)
    # A subclass may read its samples in a way of its own.
    if type(data) is TensorDataset and len(data.tensors) == 2 and reading.collate is None:
        data = (data.tensors[0], data.tensors[1])
    elif type(data) is Subset and reading.collate is None:  # as random_split makes it
        tensors = data.dataset.tensors if type(data.dataset) is TensorDataset else ()
        if len(tensors) == 2 and all(t.layout == torch.strided for t in tensors):
            places = torch.tensor([*data.indices], dtype=torch.int64)
            if bool(((places >= 0) & (places < len(tensors[0]))).all()):  # else a sample is blamed
                data = (tensors[0][places], tensors[1][places])
    if isinstance(data, tuple):
        if [isinstance(part, Tensor) for part in data] != [True, True]:
            kinds = ", ".join(type(part).__name__ for part in data)
            raise UserError(
                f"{reading.data} is a tuple of {len(data)} ({kinds}); it must be (inputs, targets),"
                " both tensors. torch.from_numpy makes one of a NumPy array."
            )
        if reading.collate is not None:
            raise UserError(
                f"The collate{defined_at(reading.collate)} has nothing to do: its data is "
                "a pair of tensors, which are cut into batches. Leave collate out, or give a "
                "Dataset."
            )
        return MemorySource(data, reading)
    if is_stream(data):
        from samestep.core.data.stream_source import StreamSource  # noqa: PLC0415

        return StreamSource(data, reading, num_workers)
    sized = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    if sized and not isinstance(data, Tensor | type | dict | str):
        from samestep.core.data.loader_source import LoaderSource  # noqa: PLC0415

        return LoaderSource(data, reading, num_workers)
    raise UserError(
        f"{reading.data} is {shown(data)}; it must be (inputs, targets) tensors, "
        "a map-style Dataset with __len__ and __getitem__, an IterableDataset, or a DataLoader of "
        "either."
    )


def open_split(
    data: Any,
    world: World,
    recipe: Recipe,
    settings: Settings,
    dtype: torch.dtype,
    lap: Lap = untimed,
    split: str = "",
) -> Source:
    """Return the source of one of a recipe's splits, as a training with these settings reads it.

    The split "training" is read in the order that the settings ask for.
    """
    trains = split == "training" and not is_stream(data)
    ordering, collate = SHUFFLED, recipe.collate
    if isinstance(data, Unpacked):
        if trains and data.sampler is not None:
            ordering = data.ordering(settings)
        # A recipe that has one, too, is a verification's: it is what all loaders have.
        collate, data = collate or data.own_collate, data.dataset
    if trains and ordering is SHUFFLED:
        ordering = ordering_of(recipe, settings, data)
    # With --batch-tokens a step has no fixed number of samples; an evaluation needs one.
    batch_size = settings.batch_size or settings.batch_size_per_rank or _EVALUATED_TOGETHER
    with made_by(recipe.data):
        return open_source(
            data,
            world,
            seed=settings.seed,
            dtype=dtype,
            num_workers=settings.num_workers,
            transform=recipe.transform,
            augment=recipe.augment,
            collate=collate,
            whole=recipe.forward is not None,
            loss_batch=batch_size if recipe.loss_over == "batch" else None,
            slots=batch_size if recipe.carry is not None else None,
            ordering=ordering,
            shuffle_buffer=settings.shuffle_buffer,
            lap=lap,
            split=split,
        )
