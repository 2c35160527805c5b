"""Which samples make up each step: a pure function, so that resuming is arithmetic.

Every epoch has one global order of all samples. A step takes the next global batch of it, and
each rank a consecutive share of that. The order knows nothing of ranks, so it is the same on
any number of them.
"""

import torch
from torch import Tensor

from samestep.data.keyed_random import mix
from samestep.errors import UserError
from samestep.recipe import InMemory


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


def split_indices(num_samples: int, fractions: tuple[float, ...], seed: int) -> list[Tensor]:
    """Return disjoint random index sets that together hold every sample.

    Args:
        num_samples: samples to share out.
        fractions: of each part but the last, which takes the rest.
        seed: of the shuffle.
    """
    order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed))
    sizes = [int(num_samples * fraction) for fraction in fractions]
    sizes.append(num_samples - sum(sizes))
    if min(sizes) < 1:
        parts = " and ".join(map(str, fractions))
        raise UserError(
            f"{num_samples} samples are too few to split into parts of {parts} and the rest: one "
            "of them would be empty. Use more samples."
        )
    return list(torch.split(order, sizes))


def hold_out(data: InMemory, fraction: float, seed: int) -> tuple[InMemory, InMemory]:
    """Return inputs and targets for training, and a random part that is held out of them."""
    held_out, rest = split_indices(len(data[0]), (fraction,), seed)
    return (data[0][rest], data[1][rest]), (data[0][held_out], data[1][held_out])
