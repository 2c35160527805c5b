"""What reads a data set as blocks, from memory or from files: the same for the same arguments."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from samestep.data.blocks import Block, Lap, Read, group_steps, untimed
from samestep.data.keyed_random import sample_keys
from samestep.data.order import epoch_order, share
from samestep.data.trees import map_leaves
from samestep.errors import UserError
from samestep.ranks.world import World
from samestep.recipe import Augment, Transform


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How samples become the batches of one rank."""

    world: World
    seed: int
    """Of the order, of the augmentation, and of what a data set draws."""
    dtype: torch.dtype
    """Of floating-point inputs and targets."""
    transform: Transform | None = None
    """Stored inputs → model inputs."""
    augment: Augment | None = None
    """(inputs, keys) → inputs, before `transform` and only for training."""
    lap: Lap = untimed
    """Told where reading ends ("data"), and copying to the device ("to_device")."""


class Source(ABC):
    """A data set that yields blocks."""

    _order_device = torch.device("cpu")

    def __init__(self, num_samples: int, reading: Reading) -> None:
        if num_samples == 0:
            raise UserError("The recipe's data has no samples.")
        self.num_samples = num_samples
        self._reading, self._world = reading, reading.world

    def steps_per_block(self, global_batch: int) -> int:  # noqa: ARG002 - memory asks for it
        """Return the most steps that a block holds: a power of two."""
        return 1

    def blocks(
        self, epoch: int, first_step: int, *, global_batch: int, drop_last: bool
    ) -> Iterator[Block]:
        """Yield this rank's part of the steps of a training epoch, from `first_step` on."""
        how, world = self._reading, self._world
        order = epoch_order(self.num_samples, how.seed, epoch).to(self._order_device)
        most = self.steps_per_block(global_batch)
        unread = group_steps(order, first_step, most, global_batch, world, drop_last=drop_last)
        for block, inputs, targets in self._read(unread, epoch):
            if how.augment is not None:
                keys = sample_keys(how.seed, epoch, block.inputs.to(world.device))
                inputs = how.augment(inputs, keys)  # noqa: PLW2901
            yield replace(block, inputs=self._finish(inputs), targets=targets)

    def evaluation(self, batch_size: int) -> Iterator[tuple[Any, Any]]:
        """Yield this rank's share of all samples once, as batches of inputs and targets."""
        mine = share(range(self.num_samples), self._world.rank, self._world.world_size)
        batches = [mine[k : k + batch_size] for k in range(0, len(mine), batch_size)]
        for inputs, targets in self._read_in_turn(batches):
            yield self._finish(inputs), targets

    @abstractmethod
    def _read(self, unread: Iterator[Block], epoch: int) -> Read:
        """Yield blocks of indices with their stored inputs and their targets, on the device."""

    @abstractmethod
    def _read_in_turn(self, batches: list[range]) -> Iterator[tuple[Any, Any]]:
        """Yield the stored inputs and the targets of consecutive samples, on the device."""

    def close(self) -> None:  # noqa: B027 - memory needs no end
        """End what reads the data; it cannot be read any more."""

    def _finish(self, inputs: Any) -> Any:
        transform = self._reading.transform
        return self._cast(transform(inputs) if transform else inputs)

    def _cast(self, tree: Any) -> Any:
        dtype = self._reading.dtype
        return map_leaves(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, tree)
