"""Any images in folders, one a class: a ResNet-18 with a stem that fits their size."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from samestep.base.errors import UserError
from samestep.base.settings import check_flags, may_change
from samestep.core.data.augment import crop, flip
from samestep.core.data.augment import normalise as normalise_channels
from samestep.core.data.images.dataset import Cache, ImageFiles
from samestep.core.data.images.decode import (
    SMALL,
    decode,
    middle,
    pillow,
    scaled_crops_and_flips,
    shorter_edge,
    stored_side,
)
from samestep.core.data.images.image_files import FileList, class_names, find_files
from samestep.core.data.keyed_random import uniform
from samestep.core.data.order import split_indices
from samestep.core.data.recipe_data import SPLITS
from samestep.core.recipe import Recipe, Splits
from samestep.core.recipes.resnet import Stem, resnet18

# Mean and standard deviation of ImageNet's training pixels, per channel, as everyone takes them.
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_USUAL_SIZE = 160
_NUM_LOOKED_AT = 64


@dataclass(frozen=True)
class ImagesOptions:
    """The options of this recipe."""

    data_dir: str = may_change("data/images")
    """Folder with train/CLASS/*.jpg (.jpeg, .png), and val/ and test/ like it, if any."""
    image_size: int | None = None
    """Side of the square that the model sees, in pixels; by default that of small images, else 160.
    """
    width: int = 64
    """Channels of the first stage; 64 is ResNet-18, fewer train faster and are less accurate."""
    cache: Cache = may_change("auto")
    """Keep decoded images in memory, once per node; auto: if they take at most half of it."""
    max_corrupt: float = may_change(0.01)
    """Largest fraction of images that may be unreadable; they are named and left out."""
    validation_fraction: float = 0.1
    """Fraction of train/ that is held out for validation if there is no val/."""
    test_fraction: float = 0.1
    """Fraction of train/ that is held out for the test if there is no test/; 0 for no test."""
    split_seed: int = 42
    """Seed of these splits."""
    classes: tuple[str, ...] = ()
    """Class names in the order of the model's outputs; by default the folders of train/, sorted."""

    def __post_init__(self) -> None:
        pixels = "be from 8 to 1024 pixels"
        check_flags(self, ["image_size"], lambda value: 8 <= value <= 1024, pixels)
        check_flags(self, ["width"], lambda value: value >= 1, "be 1 or more")
        fractions = ("max_corrupt", "validation_fraction", "test_fraction")
        check_flags(self, fractions, lambda value: 0 <= value <= 1, "lie between 0 and 1")
        if self.validation_fraction + self.test_fraction >= 1:
            raise UserError(
                f"--validation-fraction {self.validation_fraction} and --test-fraction "
                f"{self.test_fraction} leave nothing to train on: they must add up to less than 1."
            )


def complete(options: ImagesOptions) -> ImagesOptions:
    """Fill in the class names and the image size from the folder."""
    pillow()
    root = Path(options.data_dir)
    classes = options.classes or class_names(root)
    size = options.image_size or _fitting_size(root, classes)
    return replace(options, classes=classes, image_size=size)


def _fitting_size(root: Path, classes: tuple[str, ...]) -> int:
    """Return the size that suits most of some images, spread evenly over the training set."""
    files = find_files(root, "train", classes)
    assert files is not None  # it gave the classes
    step = max(1, len(files) // _NUM_LOOKED_AT)
    edges = sorted(e for k in range(0, len(files), step) if (e := shorter_edge(files.path(k))))
    middle_edge = edges[len(edges) // 2] if edges else _USUAL_SIZE
    return max(8, middle_edge) if middle_edge <= SMALL else _USUAL_SIZE


def data(options: ImagesOptions) -> Splits:
    """Find the files; the ranks read them once together before training."""
    root = Path(options.data_dir)
    parts = {name: find_files(root, name, options.classes) for name in SPLITS}
    split = _split_off({name: files for name, files in parts.items() if files}, options)
    side = stored_side(_size(options))
    splits: dict[str, Any] = {
        name: ImageFiles(files, side, cache=options.cache, max_corrupt=options.max_corrupt)
        for name, files in split.items()
    }
    return Splits(**splits, classes=options.classes)


def _size(options: ImagesOptions) -> int:
    assert options.image_size is not None, "complete() comes first"
    return options.image_size


def _split_off(parts: dict[str, FileList], options: ImagesOptions) -> dict[str, FileList]:
    """Hold out what has no folder of its own from the training files, by seed."""
    train = parts["train"]
    wanted = {"validation": options.validation_fraction, "test": options.test_fraction}
    fractions = {name: part for name, part in wanted.items() if name not in parts and part > 0}
    if not fractions:
        return parts
    indices = split_indices(len(train), tuple(fractions.values()), options.split_seed)
    # Sorted, so that neighbouring files are read one after the other.
    taken = [train.take(some.sort().values.numpy()) for some in indices]
    return {**parts, **dict(zip((*fractions, "train"), taken, strict=True))}


def model(options: ImagesOptions) -> nn.Module:
    """Return a ResNet-18 for these classes; small images keep their size in its first layers."""
    stem: Stem = "small" if _size(options) <= SMALL else "large"
    return resnet18(len(options.classes), stem=stem, width=options.width)


def read(options: ImagesOptions, file: Path) -> Tensor:
    """Return one image as it is stored: (3, side, side) uint8."""
    return decode(file, stored_side(_size(options)))


def augment(images: Tensor, keys: Tensor) -> Tensor:
    """Crop and flip stored images (batch, 3, side, side) by their keys (batch,).

    Small ones are shifted by up to 4 pixels, others cropped at a random scale; the result has the
    size that the model sees.
    """
    if images.shape[-1] <= SMALL:
        draws = uniform(keys, 3)
        return flip(crop(images, draws[:, :2], padding=4), draws[:, 2])
    return scaled_crops_and_flips(images, keys)


def normalise(images: Tensor) -> Tensor:
    """Turn images (batch, 3, side, side) into what the model takes.

    What is still uint8 comes as it was stored, from an evaluation: of larger images the middle is
    taken.
    """
    images = middle(images) if images.dtype == torch.uint8 else images
    return normalise_channels(images, _MEAN, _STD)


recipe = Recipe(
    model=model,
    data=data,
    options=ImagesOptions,
    complete=complete,
    read=read,
    transform=normalise,
    augment=augment,
    accepts=("batchnorm",),
    settings={
        "epochs": 30,
        "batch_size": 64,
        "optimizer": "sgd",
        "lr": 0.05,
        "momentum": 0.9,
        "weight_decay": 5e-4,
        "schedule": "cosine",
        "channels_last": True,
        "keep_top_k": 3,  # a checkpoint is 90 MB
    },
)
