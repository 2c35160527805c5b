"""Read IDX files, the format of MNIST and its relatives, packed with gzip or not.

An IDX file is two zero bytes, a byte for the type of the values, a byte for the number of axes, one
big-endian 32-bit length an axis, and the values in C order.
"""

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from samestep.errors import UserError

# The places below the data folder, in order; the last two are where torchvision puts its files.
_PLACES = (".", "raw", "MNIST/raw", "FashionMNIST/raw")
_GZIP_MAGIC = b"\x1f\x8b"
_TYPE_NAMES = {0x09: "int8", 0x0B: "int16", 0x0C: "int32", 0x0D: "float32", 0x0E: "float64"}


def find_idx(folder: Path, stem: str) -> Path:
    """Find one IDX file in a data folder or in the folders that torchvision makes there.

    The stem is the file's usual name without `.gz`, such as `train-images-idx3-ubyte`. The spelling
    `train-images.idx3-ubyte` and either one with `.gz` are looked for too.

    Raises:
        UserError: The file is nowhere, the folder may not be read, or torchvision's MNIST and
            FashionMNIST are both there and only a more exact folder can tell which is meant.
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
    found = own[:1] or torchvisions
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(
            f"{folder} holds {stem} twice, of different data sets:\n"
            + "".join(f"  {path}\n" for path in found)
            + f"Say which one is meant, for example --data-dir {found[0].parent}"
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
    """Read one IDX file of unsigned bytes; gzip is told from the content, not from the name.

    Returns:
        An array of the shape that the header gives: `(sample, row, column)` for images,
        `(sample,)` for labels. It is writable, as `torch.from_numpy` wants it.

    Raises:
        UserError: The file cannot be read, is empty, is a damaged gzip file, is no IDX file of
            unsigned bytes, or has fewer or more bytes than its header announces.
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
        raise ValueError(f"this is no IDX file: it starts with {data[:4]!r}, not two zero bytes")
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
    expected, found = math.prod(shape), len(data) - header
    if found != expected:
        fault = "is truncated" if found < expected else "has trailing bytes"
        raise ValueError(f"it {fault}: shape {shape} needs {expected} bytes of data, found {found}")
    try:
        # The copy makes the array writable and lets go of the header.
        return np.frombuffer(data, np.uint8, offset=header).reshape(shape).copy()
    except ValueError as problem:
        raise ValueError(f"its shape {shape} is more than NumPy can hold") from problem


def read_images_and_labels(
    folder: Path, split: Literal["train", "test"]
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Read the images and the labels of one split of an MNIST-like data set.

    Returns:
        The images `(sample, row, column)` and the labels `(sample,)`.

    Raises:
        UserError: A file is missing or broken (see `find_idx` and `read_idx`), the two files lie
            in different folders, have the wrong number of axes, or differ in length.
    """
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
