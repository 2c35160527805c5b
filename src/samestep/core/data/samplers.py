"""The order of a sampler that a user brings: asked for by seed and epoch, and proven to repeat.

All ranks ask the same sampler for the order of the global batch, so an order may depend on nothing
but the seed and the epoch: else a resumed run, or another rank, would take other samples.
"""

import hashlib
import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

from samestep.base.errors import UserError, blame, defined_at
from samestep.core.data.keyed_random import host_seeded, mix

_DRAWS = 0x5A3B1E
"""Keeps what a sampler draws apart from what samples draw for their augmentation."""
_GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)
_TIMES_THE_DATA = 16
"""Times the data that a sampler without a length may give in an epoch; more has no end."""


class SamplerOrder:
    """The samples of each epoch, in the order of a sampler or of a sampler of batches."""

    def __init__(self, sampler: Any, size: int, seed: int) -> None:
        """`size`: samples of the data. Every rank does this, with the same."""
        self._sampler, self._size, self._seed = sampler, size, seed
        self._name = f"The sampler {type(sampler).__name__}{defined_at(type(sampler))}"
        self.batch_size: int | None = None
        """Samples of each batch, if it is a sampler of batches."""
        first = self._ask(0)
        self.num_drawn = len(first)
        """Samples of an epoch."""
        self.digest = _digest(first)
        """A hash of the first epoch's order, for checkpoints."""
        self._check_again()
        self._newest = 0, first

    def order(self, epoch: int, global_batch: int) -> Tensor:
        """Return the samples of an epoch in their order, (samples,) int64."""
        if self.batch_size and global_batch % self.batch_size:
            raise UserError(
                f"{self._name} makes batches of {self.batch_size} samples, but a step has "
                f"{global_batch} over all ranks: use --batch-size {self.batch_size} or a multiple."
            )
        if epoch != self._newest[0]:
            self._newest = epoch, self._ask(epoch)
            if (num_given := len(self._newest[1])) != self.num_drawn:
                raise UserError(
                    f"{self._name} yields {num_given} samples in epoch {epoch} and "
                    f"{self.num_drawn} in epoch 0. Each epoch needs the same number, so that it "
                    "has the same steps."
                )
            self._check_again()
        return self._newest[1]

    def _check_again(self) -> None:
        if _digest(self._ask(0)) != self.digest:
            raise UserError(
                f"{self._name} yields a different order each time for the same epoch, so a run "
                "could not be resumed. Let it draw from torch, NumPy or random, or from a "
                "generator in one of its attributes, which samestep seeds; or add "
                "set_epoch(epoch), and keep no other state between epochs."
            )

    def _ask(self, epoch: int) -> Tensor:
        """Ask the sampler for an epoch, with all that it may draw from seeded by it."""
        key = mix(self._seed, _DRAWS, epoch)
        try:
            with host_seeded(key):
                for part in _samplers_and_generators(self._sampler):
                    _key(part, key, epoch)
                most = _length(self._sampler)
                limit = _TIMES_THE_DATA * self._size if most is None else most
                indices = [*islice(self._sampler, limit + 1)]
        except Exception as error:
            blame(f"{self._name} failed", error, self._sampler)
        if len(indices) > limit:
            problem = "has no end" if most is None else f"has length {most} but yields more"
            raise UserError(f"{self._name} {problem}. Give it the right __len__.")
        if indices and isinstance(indices[0], list | tuple):
            indices = self._of_batches([[*batch] for batch in indices])
        order = torch.tensor([self._place(index) for index in indices], dtype=torch.int64)
        if not len(order):
            raise UserError(f"{self._name} yields no samples.")
        return order

    def _of_batches(self, batches: list[list[Any]]) -> list[Any]:
        *full, last = map(len, batches)
        self.batch_size = full[0] if full else last
        if {*full} - {self.batch_size} or last > self.batch_size:
            raise UserError(
                f"{self._name} makes batches of {min(full)} to {max(*full, last)} samples: all but "
                "the last must be of equal size. For batches with about the same number of tokens, "
                "use Recipe(lengths=…) and --batch-tokens."
            )
        return [index for batch in batches for index in batch]

    def _place(self, index: Any) -> int:
        try:
            place = int(index)
        except (TypeError, ValueError):
            place = -1
        if not 0 <= place < self._size:
            raise UserError(
                f"{self._name} yields {index!r:.80}: it must yield sample indices, from 0 to "
                f"{self._size - 1}."
            )
        return place


def _samplers_and_generators(sampler: Any) -> Iterator[Any]:
    """Yield a sampler, the samplers in it, and the generators of both."""
    yield sampler
    for name, value in [*getattr(sampler, "__dict__", {}).items()]:
        if isinstance(value, Sampler) or name in ("sampler", "batch_sampler"):
            yield from _samplers_and_generators(value)
        elif isinstance(value, _GENERATORS):
            yield value


def _key(part: Any, key: int, epoch: int) -> None:
    """Let a sampler or a generator begin an epoch."""
    if isinstance(part, torch.Generator):
        part.manual_seed(key)
    elif isinstance(part, random.Random):
        part.seed(key)
    elif isinstance(part, np.random.RandomState):
        part.seed(key & 0xFFFFFFFF)
    elif isinstance(part, np.random.Generator):
        part.bit_generator.state = type(part.bit_generator)(key).state
    elif callable(set_epoch := getattr(part, "set_epoch", None)):
        set_epoch(epoch)


def _length(sampler: Any) -> int | None:
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):
        return None


def _digest(order: Tensor) -> str:
    return hashlib.sha256(order.numpy().data).hexdigest()[:16]
