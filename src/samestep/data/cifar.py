"""Read CIFAR-10: the binary version of its publishers, or the same images in a folder a class.

A record of the binary version is a byte for the label and 3,072 for the pixels: 32 rows of 32 in
red, then green, then blue. https://www.cs.toronto.edu/~kriz/cifar.html
"""

from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from samestep.data.images.decode import decode, pillow
from samestep.data.images.file_list import find_files
from samestep.data.images.read_all import decode_in_threads
from samestep.errors import UserError
from samestep.machine import usable_cores

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


def has_cifar10(folder: Path) -> bool:
    """Whether all files of the binary version are there, or else a folder of training images."""
    place = _binary_place(folder)
    if place is None:
        return (folder / "train").is_dir()
    return all((place / name).is_file() for name in _ALL_FILES)


def read_cifar10(folder: Path, split: Literal["train", "test"]) -> tuple[Tensor, Tensor]:
    """Return one split of CIFAR-10, from the binary version if it is there, else from images.

    Args:
        folder: it holds data_batch_1.bin … data_batch_5.bin and test_batch.bin, or has them in
            cifar-10-batches-bin/; or else train/CLASS/ and test/CLASS/ with images in them.
        split: which part.

    Returns:
        Images (samples, 3, 32, 32) uint8 and labels (samples,) int64, both as `CLASSES` counts.

    Raises:
        UserError: the folder holds neither, it holds the Python version, or a file is missing,
            unreadable or of the wrong size, label or class.
    """
    try:
        place = _binary_place(folder)
        if place is not None:
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
    missing = [name for name in _FILES[split] if not (place / name).is_file()]
    if missing:
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
            f"{path} has {num_bytes:,} bytes, which is no whole number of records of "
            f"{_RECORD_BYTES:,} bytes (10,000 of them, {10_000 * _RECORD_BYTES:,} bytes, in "
            f"CIFAR-10's own files).{guess}\n{_get(path.parent)}"
        )
    records = np.fromfile(path, np.uint8).reshape(-1, _RECORD_BYTES)
    highest = int(records[:, 0].max())
    if highest >= len(CLASSES):
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
    places = range(len(files))
    broken = decode_in_threads(files, places, images.__setitem__, decode_one, len(cores))
    if broken:
        shown = [f"  {files.path(place)}: {why}" for place, why in list(broken.items())[:5]]
        more = [f"  … and {len(broken) - 5} more"] if len(broken) > 5 else []
        raise UserError(
            f"{len(broken)} of {len(files)} images in {root / split} cannot be used:\n"
            + "\n".join([*shown, *more, "Replace or remove them."])
        )
    return images, torch.from_numpy(files.labels)


def _nothing(folder: Path) -> UserError:
    """Say what was found in place of the data; the Python version and why it is not read first."""
    for place in (folder, folder / _UNPACKED_PYTHON):
        found = next((name for name in _PYTHON_FILES if (place / name).is_file()), None)
        if found is not None:
            return UserError(
                f"{place / found} is of CIFAR-10's Python version, a pickle, which is not read: "
                "unpickling a file runs whatever code stands in it. Take the binary version, "
                f"cifar-10-binary.tar.gz.\n{_get(folder)}"
            )
    if (folder / "cifar-10-binary.tar.gz").is_file():
        return UserError(
            f"{folder} holds cifar-10-binary.tar.gz, not unpacked yet.\nVerify and unpack it: "
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
