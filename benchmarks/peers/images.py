"""Hold the data sets over IDX files that the peers load: per sample, and per batch."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from common import MEAN, STD, train_files
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset


def usual(image: Image.Image) -> Tensor:
    """Do the tensor work of torchvision's ToTensor and Normalize, without their type checks.

    torchvision copies the image, reorders it, and normalises out of place with a mean and a
    deviation that it makes tensors of, and checks, for each sample.
    """
    pixels = torch.from_numpy(np.array(image, copy=True)).view(image.height, image.width, 1)
    tensor = pixels.permute(2, 0, 1).contiguous().float().div(255)
    mean, deviation = torch.as_tensor([MEAN]), torch.as_tensor([STD])
    if not (deviation != 0).all():
        raise ValueError("a deviation of zero")
    return tensor.clone().sub_(mean.view(-1, 1, 1)).div_(deviation.view(-1, 1, 1))


def lean(image: Image.Image) -> Tensor:
    """Do the same with the fewest operations."""
    return torch.from_numpy(np.array(image)).unsqueeze(0).float().div_(255).sub_(MEAN).div_(STD)


class Images(Dataset[tuple[Tensor, int]]):
    """One sample at a time through a PIL image, as torchvision's MNIST does it."""

    def __init__(
        self, data_dir: Path | None, transform: Callable[[Image.Image], Tensor] = usual
    ) -> None:
        self.images, self.labels = train_files(data_dir)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = Image.fromarray(self.images[index].numpy())
        return self.transform(image), int(self.labels[index])


class BatchedImages(Images):
    """A whole batch at a time: the loader calls `__getitems__` once and collates nothing."""

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        images = self.images[indices].unsqueeze(1).float().div_(255).sub_(MEAN).div_(STD)
        return images, self.labels[indices]


def keep(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Collate nothing: the batch is one already."""
    return batch
