"""Two interleaved spirals: a classification problem that no straight line solves."""

import math

import torch
from torch.utils.data import TensorDataset

from samestep.errors import UserError

_TURNS = 1.5


class SpiralDataset(TensorDataset):
    """Points (num_samples, 2) on two spirals, and the spiral (num_samples,) each belongs to.

    Class 1 is class 0 turned by π. Of an odd number, class 0 has one point more.

    Args:
        num_samples: points of both classes together.
        noise: standard deviation of the normal noise added to each coordinate; the arms are π
            apart.
        seed: of the points' places and their noise.

    Raises:
        UserError: fewer than two points, or negative noise.
    """

    def __init__(self, num_samples: int = 10_000, noise: float = 0.2, seed: int = 42) -> None:
        if num_samples < 2:
            raise UserError(f"--num-samples is {num_samples}; two spirals need 2 or more.")
        if not 0 <= noise < math.inf:
            raise UserError(f"--noise is {noise}; it must be 0 or more.")
        generator = torch.Generator().manual_seed(seed)
        labels = torch.arange(num_samples) % 2
        # The square root spreads the points evenly over the length of the arm.
        radius = torch.rand(num_samples, generator=generator).sqrt() * (2 * math.pi * _TURNS)
        angle = radius + labels * math.pi
        points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
        points += noise * torch.randn(num_samples, 2, generator=generator)
        super().__init__(points, labels)
