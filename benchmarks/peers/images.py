"""Hold the data sets over IDX files that the peers load: per sample, and per batch."""

import contextlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from common import MEAN, STD, train_files
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset


def torchvision_transform() -> Callable[[Image.Image], Tensor]:
    """Return ToTensor and Normalize, as torchvision's documentation composes them for MNIST."""
    transforms = torchvision_transforms()
    normalise = transforms.Normalize((MEAN,), (STD,))
    return transforms.Compose([transforms.ToTensor(), normalise])


def torchvision_transforms() -> ModuleType:
    """Return torchvision's module of transforms.

    Beside a torch built for CUDA it is imported as it is. Beside a CPU build of torch, one built
    for CUDA lacks its compiled operators and fails at import where it describes them. No transform
    uses them, so names that are missing are declared first.
    """
    if torch.version.cuda:
        return importlib.import_module("torchvision.transforms")
    sys.path.append(str(Path(sys.prefix) / "torchvision"))  # where `make bench` puts it
    package = importlib.util.find_spec("torchvision")
    if package is None or package.origin is None:
        raise SystemExit("this peer needs torchvision: see TORCHVISION in the Makefile")
    described = Path(package.origin).with_name("_meta_registrations.py").read_text()
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in set(re.findall(r'"(?:torchvision::)?([a-z_0-9]+)"', described)):
        with contextlib.suppress(RuntimeError):  # a working build has it already
            library.define(f"{name}(Tensor a) -> Tensor")
    _keep.append(library)
    return importlib.import_module("torchvision.transforms")


_keep: list[torch.library.Library] = []  # a library that is collected takes its names along


def lean(image: Image.Image) -> Tensor:
    """Do the same with the fewest operations."""
    return torch.from_numpy(np.array(image)).unsqueeze(0).float().div_(255).sub_(MEAN).div_(STD)


class Images(Dataset[tuple[Tensor, int]]):
    """One sample at a time through a PIL image, as torchvision's MNIST does it."""

    def __init__(
        self, data_dir: Path | None, transform: Callable[[Image.Image], Tensor] | None = None
    ) -> None:
        self.images, self.labels = train_files(data_dir)
        self.transform = transform or torchvision_transform()

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
