"""MNIST digits, or any images in the same files: an MLP or a small ConvNet."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from samestep.data.download import download
from samestep.data.idx import read_images_and_labels
from samestep.data.random_split import hold_out
from samestep.errors import UserError
from samestep.recipe import Recipe, Splits

# Mean and standard deviation of MNIST's training pixels, as everyone normalises them.
_SPLITS: tuple[Literal["train", "test"], ...] = ("train", "test")
_MEAN, _STD = 0.1307, 0.3081


@dataclass(frozen=True)
class MnistOptions:
    """The options of this recipe."""

    data_dir: str = "data/mnist"
    """Folder of the IDX files, gzipped or not; also its raw/ or MNIST/raw/."""
    download: bool = False
    """Fetch MNIST into the folder first if it is not there, once a node."""
    model: Literal["simple", "convnet"] = "simple"
    """simple: 784-128-10; convnet: two convolutions and two linear layers."""
    validation_fraction: float = 1 / 12
    """Part of the training set that is held out for validation."""
    split_seed: int = 42
    """Seed of that split."""

    def __post_init__(self) -> None:
        """Check the values."""
        if not 0 < self.validation_fraction < 1:
            raise UserError(
                f"--validation-fraction is {self.validation_fraction}; it must lie between 0 and 1."
            )


class SimpleModel(nn.Module):
    """Map images (batch, 1, 28, 28) to logits (batch, 10) through one hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(784, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (batch, 10)."""
        hidden: Tensor = self.fc1(images.flatten(1)).relu()
        logits: Tensor = self.fc2(hidden)
        return logits


class ConvNet(nn.Module):
    """Map images (batch, 1, 28, 28) to logits (batch, 10) through two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (batch, 10)."""
        maps = self.conv2(self.conv1(images).relu()).relu()
        maps = self.dropout1(nn.functional.max_pool2d(maps, 2))
        hidden = self.dropout2(self.fc1(maps.flatten(1)).relu())
        logits: Tensor = self.fc2(hidden)
        return logits


def model(options: MnistOptions) -> nn.Module:
    """Return the model that was asked for."""
    return SimpleModel() if options.model == "simple" else ConvNet()


def data(options: MnistOptions) -> Splits:
    """Read the files; the images stay as they are stored, (samples, 28, 28) uint8."""
    folder = Path(options.data_dir)
    if options.download:
        _fetch(folder)
    train, validation = hold_out(
        _read(folder, "train"), options.validation_fraction, options.split_seed
    )
    return Splits(
        train=train, validation=validation, test=_read(folder, "test"), classes=tuple("0123456789")
    )


def _fetch(folder: Path) -> None:
    """Download MNIST unless files of these names are there: they may be another data set's."""
    try:
        for split in _SPLITS:
            read_images_and_labels(folder, split)
    except UserError:
        download("mnist", folder)


def _read(folder: Path, split: Literal["train", "test"]) -> tuple[Tensor, Tensor]:
    images, labels = read_images_and_labels(folder, split)
    if images.shape[1:] != (28, 28):
        raise UserError(f"The images in {folder} are {images.shape[1:]}; the models take 28 x 28.")
    return torch.from_numpy(images), torch.from_numpy(labels).long()


def normalise(images: Tensor) -> Tensor:
    """Turn stored images (batch, 28, 28) uint8 into what the models take: (batch, 1, 28, 28)."""
    scaled = images.unsqueeze(1).to(torch.float32)
    return scaled.mul_(1 / (255 * _STD)).sub_(_MEAN / _STD)


recipe = Recipe(
    model=model,
    data=data,
    options=MnistOptions,
    transform=normalise,
    accepts=("dropout",),
    settings={"epochs": 5, "batch_size": 64, "optimizer": "adam", "lr": 1e-3},
)
