"""MNIST digits, or any images in the same files: an MLP or a small ConvNet."""

import gzip
import math
import struct
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from samestep.base.errors import UserError
from samestep.base.settings import check_flags, may_change
from samestep.core.data.download import download
from samestep.core.data.images.decode import decode_grey
from samestep.core.data.order import hold_out
from samestep.core.recipe import Recipe, Splits

# The places below the data folder, in order; the last two are where torchvision puts its files.
_PLACES = (".", "raw", "MNIST/raw", "FashionMNIST/raw")
_GZIP_MAGIC = b"\x1f\x8b"
_TYPE_NAMES = {0x09: "int8", 0x0B: "int16", 0x0C: "int32", 0x0D: "float32", 0x0E: "float64"}


def find_idx(folder: Path, stem: str) -> Path:
    """Find one IDX file in a data folder or in the folders that torchvision makes there.

    The stem is the file's usual name without `.gz`, such as `train-images-idx3-ubyte`. The spelling
    `train-images.idx3-ubyte` and either one with `.gz` are looked for too.
    """
    spellings = (stem, stem.replace("-idx", ".idx"))
    names = [f"{name}{suffix}" for name in spellings for suffix in ("", ".gz")]
    places = [folder / place for place in _PLACES]
    try:
        first = [next((p / n for n in names if (p / n).is_file()), None) for p in places]
    except OSError as problem:
        raise UserError(
            f"The data folder {folder} cannot be read: {problem.strerror}.\n"
            "Make it readable for you, or name another one with --data-dir."
        ) from problem
    own, torchvisions = ([path for path in some if path] for some in (first[:2], first[2:]))
    files = own[:1] or torchvisions
    if len(files) == 1:
        return files[0]
    if files:
        raise UserError(
            f"{folder} holds {stem} twice, of different data sets:\n"
            + "".join(f"  {path}\n" for path in files)
            + f"Say which one is meant, for example --data-dir {files[0].parent}"
        )
    where = "There is a file of that name." if folder.exists() else "The folder does not exist."
    if folder.is_dir():
        where = "\n  ".join([f"Searched for {', '.join(names)} in", *map(str, places)])
    raise UserError(
        f"The data file {stem} is not in {folder}.\n{where}\n"
        f"Download it: samestep data get mnist --data-dir {folder}\n"
        "or name the folder that holds it with --data-dir."
    )


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """Read one IDX file of unsigned bytes, gzipped or not: (samples, rows, columns) or (samples,).

    The array is writable, as `torch.from_numpy` wants it.
    """
    try:
        data = path.read_bytes()
        return _values(gzip.decompress(data) if data.startswith(_GZIP_MAGIC) else data)
    except (gzip.BadGzipFile, EOFError, zlib.error, ValueError) as problem:
        damaged = not isinstance(problem, ValueError)
        fault = f"it is a damaged gzip file ({problem})" if damaged else problem
        raise UserError(
            f"The data file {path} cannot be used: {fault}.\n"
            f"Delete it and download it again: samestep data get mnist --data-dir {path.parent}"
        ) from problem
    except OSError as problem:
        raise UserError(
            f"The data file {path} cannot be read: {problem.strerror}.\n"
            "Check its name and that you may read it, or name another folder with --data-dir."
        ) from problem


def _values(data: bytes) -> npt.NDArray[np.uint8]:
    """Return the array in an IDX file's bytes; raise ValueError with what is wrong with them."""
    if not data:
        raise ValueError("the file is empty")
    if data[:2] != b"\0\0" or len(data) < 4:
        raise ValueError(f"not an IDX file: it starts with {data[:4]!r}, not two zero bytes")
    kind, num_axes = data[2], data[3]
    if kind != 0x08:
        name = _TYPE_NAMES.get(kind, "values of an unknown type")
        raise ValueError(
            f"its type code is 0x{kind:02x} ({name}); only 0x08, unsigned bytes, is read"
        )
    header = 4 + 4 * num_axes
    if len(data) < header:
        raise ValueError(f"its header is truncated: expected {header} bytes, found {len(data)}")
    shape = struct.unpack_from(f">{num_axes}I", data, 4)
    expected, size = math.prod(shape), len(data) - header
    if size != expected:
        fault = "is truncated" if size < expected else "has trailing bytes"
        raise ValueError(f"it {fault}: shape {shape} needs {expected} bytes of data, found {size}")
    try:
        # The copy makes the array writable and lets go of the header.
        return np.frombuffer(data, np.uint8, offset=header).reshape(shape).copy()
    except ValueError as problem:
        raise ValueError(f"its shape {shape} is more than NumPy can hold") from problem


def read_images_and_labels(
    folder: Path, split: Literal["train", "test"]
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Read one split of an MNIST-like data set: images (samples, rows, columns) and labels."""
    # MNIST names its test files after their ten thousand images.
    prefix = {"train": "train", "test": "t10k"}[split]
    images_path = find_idx(folder, f"{prefix}-images-idx3-ubyte")
    labels_path = find_idx(folder, f"{prefix}-labels-idx1-ubyte")
    pair = f"  images: {images_path}\n  labels: {labels_path}\n"
    if images_path.parent != labels_path.parent:
        # MNIST and Fashion-MNIST have equal lengths, so nothing later would notice a mixed pair.
        raise UserError(
            f"The images and labels of the {split} split lie in different folders:\n{pair}"
            "They may be of different data sets. Put both files into one folder."
        )
    images, labels = read_idx(images_path), read_idx(labels_path)
    if images.ndim != 3 or labels.ndim != 1:
        raise UserError(
            f"The {split} split needs images of 3 axes and labels of 1 axis, but found "
            f"shapes {images.shape} and {labels.shape}:\n{pair}"
            "Check that the files were not swapped or renamed, or download them again."
        )
    if len(images) != len(labels):
        raise UserError(
            f"The {split} split has {len(images)} images but {len(labels)} labels:\n{pair}"
            "The two files do not belong together. Download both again."
        )
    return images, labels


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
    """Download MNIST into the folder first if it is not there, once per node."""
    model: Literal["simple", "convnet"] = "simple"
    """simple: 784-128-10; convnet: two convolutions and two linear layers."""
    validation_fraction: float = 1 / 12
    """Fraction of the training set that is held out for validation: 5,000 of 60,000."""
    split_seed: int = 42
    """Seed of the split into training and validation set."""

    def __post_init__(self) -> None:
        within = "lie between 0 and 1"
        check_flags(self, ["validation_fraction"], lambda value: 0 < value < 1, within)


def model(options: MnistOptions) -> nn.Module:
    """Return the model that was asked for."""
    layers: dict[str, nn.Module]
    if options.model == "simple":
        layers = {"flatten": nn.Flatten(), "fc1": nn.Linear(784, 128), "relu": nn.ReLU()}
    else:
        layers = {
            "conv1": nn.Conv2d(1, 32, 3),
            "relu1": nn.ReLU(),
            "conv2": nn.Conv2d(32, 64, 3),
            "relu2": nn.ReLU(),
            "pool": nn.MaxPool2d(2),
            "dropout1": nn.Dropout(0.25),
            "flatten": nn.Flatten(),
            "fc1": nn.Linear(9216, 128),
            "relu3": nn.ReLU(),
            "dropout2": nn.Dropout(0.5),
        }
    return nn.Sequential(OrderedDict(layers, fc2=nn.Linear(128, 10)))


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


_USUAL = {"epochs": 5, "batch_size": 64, "eval_batch_size": 256, "optimizer": "adam", "lr": 1e-3}

recipe = Recipe(
    model=model,
    data=data,
    read=read,
    options=MnistOptions,
    transform=normalise,
    accepts=("dropout",),
    settings=_USUAL,
)
