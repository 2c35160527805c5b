"""Read a folder of JPEGs in plain PyTorch: decode, pad, crop, flip, normalise in the workers.

The transforms are those that everyone composes for CIFAR-10, on Pillow's images as torchvision has
them, written out by hand. No model is trained: the batches are all that is timed.
"""

import random
from pathlib import Path

import numpy as np
import torch
from common import measure, options
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

BATCH_SIZE = 128
MEAN = torch.tensor((0.485, 0.456, 0.406)).view(3, 1, 1)
STD = torch.tensor((0.229, 0.224, 0.225)).view(3, 1, 1)


class Jpegs(Dataset[tuple[Tensor, int]]):
    """One file at a time, as torchvision's ImageFolder with its usual transforms does it."""

    def __init__(self, folder: Path) -> None:
        classes = sorted(place for place in folder.iterdir() if place.is_dir())
        self.samples = [
            (str(path), label)
            for label, place in enumerate(classes)
            for path in sorted(place.iterdir())
        ]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        with open(path, "rb") as file:  # noqa: PTH123 - as torchvision's loader does
            image = Image.open(file).convert("RGB")
        padded = ImageOps.expand(image, 4)
        left, top = random.randint(0, 8), random.randint(0, 8)
        image = padded.crop((left, top, left + 32, top + 32))
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        tensor = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
        return tensor.float().div_(255).sub_(MEAN).div_(STD), label


asked = options()
assert asked.data_dir is not None
loader = DataLoader(
    Jpegs(asked.data_dir / "train"),
    batch_size=BATCH_SIZE,
    shuffle=True,
    num_workers=asked.workers,
    persistent_workers=asked.workers > 0,
)


def train_epoch(_epoch: int) -> int:
    return sum(len(targets) for _inputs, targets in loader)


measure(train_epoch, asked.epochs)
