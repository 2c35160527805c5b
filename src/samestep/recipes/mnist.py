"""MNIST digits, or any images in the same files: an MLP or a small ConvNet."""

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from samestep.data.download import download
from samestep.data.idx import read_images_and_labels
from samestep.data.images.decode import decode_grey
from samestep.data.random_split import hold_out
from samestep.errors import UserError
from samestep.recipe import Recipe, Splits
from samestep.settings import check_flags, may_change

_FASHION = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
# The files of Fashion-MNIST have the names, sizes and classes 0 to 9 of MNIST's; these are the
# first labels of its training set.
_FASHION_LABELS = [9, 0, 0, 3, 0, 2, 7, 2, 5, 5, 0, 9, 5, 5, 7, 9]

# Mean and standard deviation of MNIST's training pixels, as everyone normalises them.
_MEAN, _STD = 0.1307, 0.3081


@dataclass(frozen=True)
class MnistOptions:
    """The options of this recipe."""

    data_dir: str = may_change("data/mnist")
    """Folder of the IDX files, gzipped or not; also its raw/ or MNIST/raw/."""
    download: bool = may_change(False)
    """Fetch MNIST into the folder first if it is not there, once a node."""
    model: Literal["simple", "convnet"] = "simple"
    """simple: 784-128-10; convnet: two convolutions and two linear layers."""
    validation_fraction: float = 1 / 12
    """Part of the training set that is held out for validation."""
    split_seed: int = 42
    """Seed of that split."""

    def __post_init__(self) -> None:
        within = "lie between 0 and 1"
        check_flags(self, ["validation_fraction"], lambda value: 0 < value < 1, within)


def _simple() -> nn.Module:
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        flatten=nn.Flatten(), fc1=nn.Linear(784, 128), relu=nn.ReLU(), fc2=nn.Linear(128, 10)
    )
    return nn.Sequential(layers)


def _convnet() -> nn.Module:
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(1, 32, 3),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(32, 64, 3),
        relu2=nn.ReLU(),
        pool=nn.MaxPool2d(2),
        dropout1=nn.Dropout(0.25),
        flatten=nn.Flatten(),
        fc1=nn.Linear(9216, 128),
        relu3=nn.ReLU(),
        dropout2=nn.Dropout(0.5),
        fc2=nn.Linear(128, 10),
    )
    return nn.Sequential(layers)


def model(options: MnistOptions) -> nn.Module:
    """Return the model that was asked for."""
    return _simple() if options.model == "simple" else _convnet()


def data(options: MnistOptions) -> Splits:
    """Read the files; the images stay as they are stored, (samples, 28, 28) uint8."""
    folder = Path(options.data_dir)
    if options.download:
        try:  # other files of these names may be another data set's: they are kept
            read_images_and_labels(folder, "train")
            read_images_and_labels(folder, "test")
        except UserError:
            download("mnist", folder)
    images, labels = _read(folder, "train")
    fashion = labels[: len(_FASHION_LABELS)].tolist() == _FASHION_LABELS
    train, validation = hold_out((images, labels), options.validation_fraction, options.split_seed)
    return Splits(
        train=train,
        validation=validation,
        test=_read(folder, "test"),
        classes=_FASHION if fashion else tuple("0123456789"),
    )


def _read(folder: Path, split: Literal["train", "test"]) -> tuple[Tensor, Tensor]:
    images, labels = read_images_and_labels(folder, split)
    if images.shape[1:] != (28, 28):
        raise UserError(f"The images in {folder} are {images.shape[1:]}; the models take 28 x 28.")
    return torch.from_numpy(images), torch.from_numpy(labels).long()


def normalise(images: Tensor) -> Tensor:
    """Turn stored images (batch, 28, 28) uint8 into what the models take: (batch, 1, 28, 28)."""
    scaled = images.unsqueeze(1).to(torch.float32)
    return scaled.mul_(1 / (255 * _STD)).sub_(_MEAN / _STD)


def read(_options: MnistOptions, file: Path) -> Tensor:
    """Return the middle of any image as MNIST's are stored: (28, 28) uint8, light on dark."""
    image = decode_grey(file, 28)
    border = torch.cat([image[0], image[-1], image[1:-1, 0], image[1:-1, -1]])
    # Ink on paper. No image of MNIST's test set and of Fashion-MNIST has a border above 108.
    return 255 - image if border.float().mean() > 127.5 else image


recipe = Recipe(
    model=model,
    data=data,
    read=read,
    options=MnistOptions,
    transform=normalise,
    accepts=("dropout",),
    settings={
        "epochs": 5,
        "batch_size": 64,
        "eval_batch_size": 256,
        "optimizer": "adam",
        "lr": 1e-3,
    },
)
