"""One rank's part of a step, as a loop of one's own gets it."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from samestep.data.keyed_random import mix, normal, sample_keys, uniform
from samestep.data.prefetch import send


@dataclass(kw_only=True)
class Batch:
    """One rank's part of one step.

    What `uniform` and `normal` draw belongs to the samples: a sample gets the same numbers on any
    number of ranks and after any resume, other ones in each epoch and in each call of a step.
    """

    data: Any
    """The samples, on the device: a pair of tensors, a tensor, or any tree that was collated."""
    rows: int
    """Samples in it."""
    weight: float
    """The part of the global batch that is in it. A mean over its samples times this, added up over
    all ranks, is the mean over the global batch. 0 where the samples only stand in for an empty
    share, so that this rank takes part in the step's collectives."""
    global_size: int
    """Samples of the step over all ranks."""
    epoch: int
    """Epochs before this one."""
    step: int
    """Steps of the run before this one."""
    indices: Tensor
    """(rows,) int64 on the CPU: the place of each sample in the data."""
    device: torch.device
    seed: int
    calls: int = 0
    """How often numbers were drawn in this step."""

    @cached_property
    def keys(self) -> Tensor:
        """(rows,) int64 on the device: a key for each sample in this epoch, for an augmentation."""
        return sample_keys(self.seed, self.epoch, self._indices)

    @cached_property
    def _indices(self) -> Tensor:
        return send(self.indices, self.device)

    def uniform(self, *shape: int) -> Tensor:
        """Return numbers in [0, 1) for each sample: (rows, *shape), of PyTorch's default type."""
        drawn = uniform(self._next_keys(), math.prod(shape))
        return drawn.view(self.rows, *shape).to(torch.get_default_dtype())

    def normal(self, *shape: int) -> Tensor:
        """Return numbers of mean 0 and variance 1: (rows, *shape), of PyTorch's default type."""
        drawn = normal(self._next_keys(), math.prod(shape))
        return drawn.view(self.rows, *shape).to(torch.get_default_dtype())

    def _next_keys(self) -> Tensor:
        self.calls += 1
        return sample_keys(mix(self.seed, self.calls), self.epoch, self._indices)
