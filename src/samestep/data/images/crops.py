"""Crops of whole batches of stored images: at a random scale for training, the middle otherwise."""

import torch
from torch import Tensor, nn

from samestep.data.images.decode import model_side
from samestep.data.keyed_random import uniform

_LEAST_AREA = 0.25
"""Smallest part of the stored image in a crop. The usual 0.08 is for crops of the original file;
of what is kept here so small a part would be magnified more than threefold."""
_MOST_STRETCH = 1 / 3
"""A crop is at most this much wider than high or higher than wide: 3/4 to 4/3, as usual."""


def scaled_crops_and_flips(images: Tensor, keys: Tensor) -> Tensor:
    """Return a random part of each image, scaled to the size of the model, half of them mirrored.

    As in Szegedy et al. (2015), "Going deeper with convolutions", section 6: parts of random area
    and aspect ratio; from half-pixel centres by bilinear interpolation.

    Args:
        images: (batch, channels, stored side, stored side), uint8.
        keys: (batch,) int64.

    Returns:
        (batch, channels, model side, model side), float32 from 0 to 255.
    """
    draws = uniform(keys, 5)
    # Only operations that IEEE 754 defines to the last bit: exp and log may differ between the
    # body and the rest of a vector, and then a sample would depend on its place in the batch.
    area = _LEAST_AREA + (1 - _LEAST_AREA) * draws[:, 0]
    stretch = 1 + _MOST_STRETCH * (2 * draws[:, 1] - 1).abs()
    stretch = torch.where(draws[:, 1] < 0.5, 1 / stretch, stretch)
    width = (area * stretch).sqrt().clamp(max=1.0)
    height = (area / stretch).sqrt().clamp(max=1.0)
    left, top = (1 - width) * draws[:, 2], (1 - height) * draws[:, 3]
    side = model_side(images.shape[-1])
    centres = (torch.arange(side, device=images.device) + 0.5) / side
    mirrored = torch.where(draws[:, 4:] < 0.5, centres.flip(0), centres)
    across = left[:, None] + width[:, None] * mirrored
    down = top[:, None] + height[:, None] * centres
    shape = (len(images), side, side)
    grid = torch.stack((across[:, None].expand(shape), down[:, :, None].expand(shape)), dim=-1)
    return nn.functional.grid_sample(
        images.to(torch.float32), 2 * grid - 1, padding_mode="border", align_corners=False
    )


def middle(images: Tensor) -> Tensor:
    """Return the part of stored images (batch, channels, side, side) that an evaluation sees."""
    stored = images.shape[-1]
    side = model_side(stored)
    start = (stored - side) // 2
    return images[..., start : start + side, start : start + side]
