"""Random crops and flips of whole batches, from draws that belong to the samples, not to the rank.

The draws come from `samestep.uniform(keys, n)`. Each function takes columns of its own: two that
shared one would not be independent.
"""

from functools import lru_cache

import torch
from torch import Tensor, nn


def crop(images: Tensor, draws: Tensor, *, padding: int) -> Tensor:
    """Return a random window of each image, as large as the image, after padding it with zeros.

    As in He et al. (2016), section 4.2, with a padding of 4 for images of 32 x 32.

    Args:
        images: (batch, channels, height, width), of any type.
        draws: (batch, 2) in [0, 1): where the window begins, from the top and from the left.
        padding: pixels of zeros on each side.
    """
    height, width = images.shape[-2:]
    padded = nn.functional.pad(images, (padding,) * 4)
    # The clamp is for a draw next to 1, whose product may be rounded up.
    starts = (draws * (2 * padding + 1)).long().clamp_(max=2 * padding)
    # Every window as a view: (batch, channels, starts, starts, height, width).
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)
    rows = torch.arange(len(images), device=images.device)
    return windows[rows, :, starts[:, 0], starts[:, 1]]


def flip(images: Tensor, draws: Tensor) -> Tensor:
    """Return images (batch, channels, height, width), mirrored where a draw (batch,) is below ½."""
    return torch.where((draws < 0.5)[:, None, None, None], images.flip(-1), images)


def normalise(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Return bytes (batch, channels, height, width) as float32 of about mean 0 and deviation 1.

    Args:
        images: uint8.
        mean: of each channel over the training set, on a scale from 0 to 1.
        std: standard deviation of each channel, on the same scale.
    """
    scale, shift = _affine(mean, std, images.device)
    return images.to(torch.float32).mul_(scale).sub_(shift)


@lru_cache(maxsize=8)
def _affine(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    # Kept, since copying them to a device for every batch would make the host wait for it.
    means, deviations = torch.tensor(mean), torch.tensor(std)
    scale, shift = 1 / (255 * deviations), means / deviations
    return scale.view(-1, 1, 1).to(device), shift.view(-1, 1, 1).to(device)
