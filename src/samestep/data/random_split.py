"""Share out a data set by seed."""

import torch
from torch import Tensor

from samestep.errors import UserError
from samestep.recipe import InMemory


def split_indices(num_samples: int, fractions: tuple[float, ...], seed: int) -> list[Tensor]:
    """Return disjoint random index sets that together hold every sample.

    Args:
        num_samples: samples to share out.
        fractions: of each part but the last, which takes the rest.
        seed: of the shuffle.

    Raises:
        UserError: a part would be empty.
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
