"""Which samples make up each step: a pure function, so that resuming is arithmetic.

Every epoch has one global order of all samples. A step takes the next global batch of it, and
each rank a consecutive share of that. The order knows nothing of ranks, so it is the same on
any number of them.
"""

import torch
from torch import Tensor

from samestep.data.keyed_random import mix


def epoch_order(num_samples: int, seed: int, epoch: int) -> Tensor:
    """Return the order of all samples in an epoch: (samples,), int64, each index once."""
    generator = torch.Generator().manual_seed(mix(seed, epoch))
    return torch.randperm(num_samples, generator=generator)


def steps_per_epoch(num_samples: int, global_batch: int, *, drop_last: bool = False) -> int:
    """Return the number of global batches in an epoch, an incomplete last one included."""
    return num_samples // global_batch if drop_last else -(-num_samples // global_batch)


def step_range(num_samples: int, global_batch: int, step: int) -> range:
    """Return the positions in the epoch's order that one step of the epoch takes."""
    return range(step * global_batch, min((step + 1) * global_batch, num_samples))


def share(positions: range, rank: int, world_size: int) -> range:
    """Return a rank's part of some positions; shares differ by at most one, larger ones first."""
    size, extra = divmod(len(positions), world_size)
    start = positions.start + rank * size + min(rank, extra)
    return range(start, start + size + (rank < extra))
