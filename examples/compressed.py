"""A recipe whose samples are unpacked one by one: `samestep profile` finds how many workers to use.

samestep profile examples/compressed.py --workers 0,1,2
"""

import zlib

import torch
from torch import nn

from samestep import Recipe, Splits


class Compressed(torch.utils.data.Dataset):
    """Images that are kept as zlib wrote them, as files on a disk would be."""

    def __init__(self, num_samples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.arange(num_samples) % 2
        self.packed = [
            zlib.compress(torch.randint(4, (256 * 256,), generator=generator).byte().numpy())
            for _ in range(num_samples)
        ]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        pixels = torch.frombuffer(bytearray(zlib.decompress(self.packed[index])), dtype=torch.uint8)
        return pixels.view(1, 256, 256).float() / 4, self.labels[index]


def data() -> Splits:
    """Return 640 images to train on and 64 to validate."""
    return Splits(train=Compressed(640), validation=Compressed(64))


def model() -> nn.Module:
    """Return a small convolutional network."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 8, stride=8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(64, 2),
    )


recipe = Recipe(model=model, data=data, settings={"epochs": 2, "batch_size": 32})
