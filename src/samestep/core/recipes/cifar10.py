"""CIFAR-10, ResNet-18 and a faster network: 32 x 32 colour images of ten classes."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from samestep.base.errors import UserError, listed
from samestep.base.machine import usable_cores
from samestep.base.settings import check_flags, may_change
from samestep.core.data.augment import crop, flip
from samestep.core.data.augment import normalise as normalise_channels
from samestep.core.data.download import download
from samestep.core.data.images.decode import decode, pillow
from samestep.core.data.images.image_files import decode_in_threads, find_files
from samestep.core.data.keyed_random import uniform
from samestep.core.data.order import hold_out
from samestep.core.recipe import Recipe, Splits
from samestep.core.recipes.resnet import resnet18
from samestep.core.recipes.small_convnet import small_convnet

CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
"""What the labels 0 … 9 of the binary version mean; in alphabetical order, as it happens."""

SIZES = {"train": 50_000, "test": 10_000}
"""Images of each split as it was published."""

_FILES = {"train": [f"data_batch_{k}.bin" for k in range(1, 6)], "test": ["test_batch.bin"]}
_ALL_FILES = [*_FILES["train"], *_FILES["test"]]
_RECORD_BYTES = 1 + 3 * 32 * 32

# Where the archives of the two versions put their files.
_UNPACKED, _UNPACKED_PYTHON = "cifar-10-batches-bin", "cifar-10-batches-py"
_PYTHON_FILES = ("data_batch_1", "test_batch", "batches.meta", "cifar-10-python.tar.gz")


def read_cifar10(folder: Path, split: Literal["train", "test"]) -> tuple[Tensor, Tensor]:
    """Return one split of CIFAR-10, from the binary version if it is there, else from images.

    Args:
        folder: it holds data_batch_1.bin … data_batch_5.bin and test_batch.bin, or has them in
            cifar-10-batches-bin/; or else train/CLASS/ and test/CLASS/ with images in them.
        split: which part.

    Returns:
        Images (samples, 3, 32, 32) uint8 and labels (samples,) int64, both as `CLASSES` counts.
    """
    try:
        if (place := _binary_place(folder)) is not None:
            return _read_binary(place, split)
        if (folder / "train").is_dir() or (folder / "test").is_dir():
            return _read_images(folder, split)
        raise _nothing(folder)
    except OSError as problem:
        raise UserError(
            f"{problem.filename or folder} cannot be read: {problem.strerror or problem}.\n"
            "Make it readable for you, or name another folder with --data-dir."
        ) from problem


def _binary_place(folder: Path) -> Path | None:
    places = (folder, folder / _UNPACKED)
    return next((p for p in places if any((p / name).is_file() for name in _ALL_FILES)), None)


def _read_binary(place: Path, split: Literal["train", "test"]) -> tuple[Tensor, Tensor]:
    if missing := [name for name in _FILES[split] if not (place / name).is_file()]:
        raise UserError(f"{place} lacks {', '.join(missing)} of CIFAR-10.\n{_get(place)}")
    parts = [_records(place / name) for name in _FILES[split]]
    records = torch.cat([torch.from_numpy(part) for part in parts])
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].long()


def _records(path: Path) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """Return the records of one file (records, 3073)."""
    num_bytes = path.stat().st_size
    if num_bytes == 0 or num_bytes % _RECORD_BYTES:
        whole = num_bytes and num_bytes % (_RECORD_BYTES + 1) == 0  # a coarse and a fine label
        guess = " They are as long as those of CIFAR-100, which is not read here." if whole else ""
        raise UserError(
            f"{path} has {num_bytes:,} bytes, which is not a whole number of records of "
            f"{_RECORD_BYTES:,} bytes (10,000 of them, {10_000 * _RECORD_BYTES:,} bytes, in "
            f"CIFAR-10's own files).{guess}\n{_get(path.parent)}"
        )
    records = np.fromfile(path, np.uint8).reshape(-1, _RECORD_BYTES)
    if (highest := int(records[:, 0].max())) >= len(CLASSES):
        number = int(records[:, 0].argmax())
        raise UserError(
            f"{path}: record {number} has label {highest}; CIFAR-10's are 0 to 9. The file is "
            f"damaged, or of another data set.\n{_get(path.parent)}"
        )
    return records


def _read_images(root: Path, split: Literal["train", "test"]) -> tuple[Tensor, Tensor]:
    """Decode root/split/CLASS/ into memory, class by class, each in the order of its names."""
    pillow()
    files = find_files(root, split, CLASSES, whole=True)
    if files is None:
        raise UserError(
            f"There is no folder {root / split}. It must hold a folder of images for each class: "
            f"{', '.join(CLASSES)}."
        )
    images = torch.empty((len(files), 3, 32, 32), dtype=torch.uint8)
    decode_one, cores = partial(decode, side=32, exact=True), usable_cores()
    broken = decode_in_threads(files, range(len(files)), images.__setitem__, decode_one, len(cores))
    if broken:
        why = [f"{files.path(place)}: {reason}" for place, reason in broken.items()]
        shown = listed(why, 5, "\n  ")
        raise UserError(
            f"{len(broken)} of {len(files)} images in {root / split} cannot be used:\n  {shown}\n"
            "Replace or remove them."
        )
    return images, torch.from_numpy(files.labels)


def _nothing(folder: Path) -> UserError:
    """Return the error for a folder without the data: the Python version is named first."""
    for place in (folder, folder / _UNPACKED_PYTHON):
        pickled = next((name for name in _PYTHON_FILES if (place / name).is_file()), None)
        if pickled is not None:
            return UserError(
                f"{place / pickled} is of CIFAR-10's Python version, a pickle, which is not read: "
                "unpickling a file runs whatever code stands in it. Take the binary version, "
                f"cifar-10-binary.tar.gz.\n{_get(folder)}"
            )
    if (folder / "cifar-10-binary.tar.gz").is_file():
        return UserError(
            f"{folder} holds cifar-10-binary.tar.gz, still packed.\nVerify and unpack it: "
            f"samestep data get cifar10 --data-dir {folder}"
        )
    what = "does not exist" if not folder.exists() else "holds no CIFAR-10"
    return UserError(
        f"The data folder {folder} {what}. Looked for data_batch_1.bin … data_batch_5.bin and "
        f"test_batch.bin in it and in its {_UNPACKED}/, and for train/CLASS/ and test/CLASS/ "
        f"with images.\n{_get(folder)}"
    )


def _get(folder: Path) -> str:
    folder = folder.parent if folder.name == _UNPACKED else folder
    return (
        f"Download it: samestep data get cifar10 --data-dir {folder}\n"
        "or name the folder that holds it with --data-dir."
    )


# Of CIFAR-10's training pixels, by channel, as everyone normalises them.
_MEAN, _STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


@dataclass(frozen=True)
class Cifar10Options:
    """The options of this recipe."""

    data_dir: str = may_change("data/cifar10")
    """Folder of the binary version (*.bin, or cifar-10-batches-bin/), or of train/CLASS/*.jpg."""
    download: bool = may_change(False)
    """Download the binary version into the folder first if no data is there, once per node."""
    model: Literal["resnet18", "small"] = "resnet18"
    """The network; small takes a fifth of ResNet-18's multiplications."""
    width: int = 64
    """Channels of the first stage; fewer train faster and are less accurate."""
    validation_fraction: float = 0.1
    """Fraction of the training set that is held out for validation: 5,000 of 50,000."""
    split_seed: int = 42
    """Seed of the split into training and validation set."""

    def __post_init__(self) -> None:
        check_flags(self, ["width"], lambda value: value >= 1, "be 1 or more")
        within = "lie between 0 and 1"
        check_flags(self, ["validation_fraction"], lambda value: 0 < value < 1, within)


def model(options: Cifar10Options) -> nn.Module:
    """Return the network that was asked for; ResNet-18 with the stem for small images."""
    if options.model == "small":
        return small_convnet(len(CLASSES), width=options.width)
    return resnet18(len(CLASSES), stem="small", width=options.width)


def fetch(options: Cifar10Options) -> None:
    """Download the binary version if the options ask for it and no data is there."""
    folder = Path(options.data_dir)
    place = _binary_place(folder)
    wanted = [folder / "train"] if place is None else [place / name for name in _ALL_FILES]
    if options.download and not all(path.exists() for path in wanted):
        download("cifar10", folder)


def data(options: Cifar10Options) -> Splits:
    """Read the files; the images stay as they are stored, (samples, 3, 32, 32) uint8."""
    folder = Path(options.data_dir)
    fetch(options)
    whole, test = read_cifar10(folder, "train"), read_cifar10(folder, "test")
    train, validation = hold_out(whole, options.validation_fraction, options.split_seed)
    return Splits(
        train=train,
        validation=validation,
        test=test,
        classes=CLASSES,
        notes=tuple(  # files may have been cut off
            f"The {name} set has {size:,} images; CIFAR-10's has {SIZES[name]:,}."
            for name, size in (("train", len(whole[0])), ("test", len(test[0])))
            if size != SIZES[name]
        ),
    )


def augment(images: Tensor, keys: Tensor) -> Tensor:
    """Crop at random out of a border of 4 black pixels, and mirror every other image."""
    draws = uniform(keys, 3)
    return flip(crop(images, draws[:, :2], padding=4), draws[:, 2])


def normalise(images: Tensor) -> Tensor:
    """Turn stored images (batch, 3, 32, 32) uint8 into what the model takes."""
    return normalise_channels(images, _MEAN, _STD)


def read(_options: Cifar10Options, file: Path) -> Tensor:
    """Return the middle of any image as the model's are stored: (3, 32, 32) uint8."""
    return decode(file, 32)


recipe = Recipe(
    model=model,
    data=data,
    options=Cifar10Options,
    read=read,
    augment=augment,
    transform=normalise,
    accepts=("batchnorm",),
    settings={
        "epochs": 50,
        "batch_size": 128,
        "eval_batch_size": 512,
        "optimizer": "sgd",
        "lr": 0.1,
        "base_batch_size": 128,  # --lr-scaling linear then scales with the global batch
        "momentum": 0.9,
        "weight_decay": 5e-4,
        # Without it the loss rises to 7 in the first ten steps; linear scaling needs it more yet.
        "warmup_steps": 300,
        "schedule": "cosine",
        "channels_last": True,
        "keep_top_k": 3,  # a checkpoint is 90 MB
    },
)
