"""Turn the order into tensors on the device: whole-batch gather from memory, or a DataLoader.

Both sources yield the same blocks for the same arguments, so the loop does not know which it has.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from samestep.data.blocks import Block, Lap, untimed
from samestep.data.loader import LoaderSource
from samestep.data.memory import MemorySource
from samestep.errors import UserError
from samestep.ranks.world import World
from samestep.recipe import Augment, InMemory, Transform


class Source(Protocol):
    """A data set that yields blocks."""

    num_samples: int

    def steps_per_block(self, global_batch: int) -> int:
        """Return the most steps that a block holds: a power of two."""

    def blocks(
        self, epoch: int, first_step: int, *, global_batch: int, drop_last: bool
    ) -> Iterator[Block]:
        """Yield this rank's part of the steps of a training epoch, from `first_step` on."""

    def evaluation(self, batch_size: int) -> Iterator[tuple[Any, Any]]:
        """Yield this rank's share of all samples once, as batches of inputs and targets."""

    def close(self) -> None:
        """End what reads the data; it cannot be read any more."""


def open_source(
    data: InMemory | Dataset[Any],
    world: World,
    *,
    seed: int,
    dtype: torch.dtype,
    num_workers: int,
    transform: Transform | None = None,
    augment: Augment | None = None,
    lap: Lap = untimed,
) -> Source:
    """Return the source that suits a data set: memory for tensors, else a DataLoader.

    Args:
        data: inputs and targets as they are stored, or a map-style data set.
        world: whose part of the samples.
        seed: of the order, and of what a data set draws.
        dtype: of floating-point inputs and targets.
        num_workers: processes that read a data set.
        transform: stored inputs → model inputs, a whole batch on the device.
        augment: (inputs, keys (batch,) int64) → inputs, before `transform` and only for training.
        lap: told where reading ends ("data"), and copying to the device ("to_device").

    Raises:
        UserError: the data has no samples, or is neither tensors nor a map-style data set.
    """
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        data = (data.tensors[0], data.tensors[1])
    if isinstance(data, tuple):
        if [isinstance(part, Tensor) for part in data] != [True, True]:
            kinds = ", ".join(type(part).__name__ for part in data)
            raise UserError(
                f"The recipe's data is a tuple of {len(data)} ({kinds}); it must be (inputs, "
                "targets), both tensors. torch.from_numpy makes one of a NumPy array."
            )
        source: Source = MemorySource(
            data, world, seed=seed, dtype=dtype, transform=transform, augment=augment, lap=lap
        )
    elif hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        source = LoaderSource(
            data,
            world,
            seed=seed,
            dtype=dtype,
            num_workers=num_workers,
            transform=transform,
            augment=augment,
            lap=lap,
        )
    else:
        raise UserError(
            f"The recipe's data is a {type(data).__name__}; it must be (inputs, targets) tensors "
            "or a map-style Dataset with __len__ and __getitem__."
        )
    if source.num_samples == 0:
        raise UserError("The recipe's data has no samples.")
    return source
