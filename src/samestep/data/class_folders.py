"""Images of one size in a folder a class, decoded once into memory.

For a set that fits there, like CIFAR-10's 60,000 images of 32 x 32 (184 MB). Pillow decodes; it is
an extra, imported when it is first needed.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from samestep.data.images.decode import pillow, why_unreadable
from samestep.data.images.folders import Files, find_files, subfolders
from samestep.errors import UserError

# So many file names go to a thread at once: handing over one by one would cost as much again.
_FILES_PER_TASK = 256


def read_class_folders(
    root: Path, split: str, classes: Sequence[str], *, size: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return all images of root/split/CLASS/, class by class, each in the order of its names.

    Args:
        root: the data folder.
        split: `train` or `test`; its folder has one folder for each class, and no others.
        classes: their names; a label is a place in them.
        size: (width, height) that every image must have.

    Returns:
        Images (samples, 3, height, width) uint8 and labels (samples,) int64.

    Raises:
        UserError: Pillow is missing; a class has no folder or no images, or a folder no class; or
            images cannot be decoded or have another size, with the names of the first few.
        OSError: a folder cannot be listed.
    """
    pillow()
    _check_classes(root / split, classes)
    files = find_files(root, split, classes, whole=True)
    assert files is not None, "its folder is there"
    images = np.empty((len(files), 3, size[1], size[0]), np.uint8)
    problems: list[str] = []
    tasks = range(0, len(files), _FILES_PER_TASK)
    # Threads: Pillow lets go of Python's lock while it decodes.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        task = partial(_decode_some, files, images)
        for found in pool.map(task, tasks):
            problems += found
    if problems:
        more = f"\n  … and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise UserError(
            f"{len(problems)} of {len(files)} images in {root / split} cannot be used:\n  "
            + "\n  ".join(problems[:5])
            + f"{more}\nReplace or remove them."
        )
    return torch.from_numpy(images), torch.from_numpy(files.labels)


def _check_classes(folder: Path, classes: Sequence[str]) -> None:
    """Check that the folders of a split are the classes, all of them and no others."""
    if not folder.is_dir():
        raise UserError(
            f"There is no folder {folder}. It must hold a folder of images for each class: "
            f"{', '.join(classes)}."
        )
    present = subfolders(folder)
    wrong = [f"{name} is missing" for name in classes if name not in present]
    wrong += [f"{name} is no class" for name in present if name not in classes]
    if wrong:
        raise UserError(
            f"The class folders in {folder} are not those expected: {'; '.join(wrong[:5])}"
            f"{f'; and {len(wrong) - 5} more' if len(wrong) > 5 else ''}. Expected: "
            f"{', '.join(classes)}."
        )


def _decode_some(files: Files, images: npt.NDArray[np.uint8], start: int) -> list[str]:
    """Decode the files from `start` on into their places; return what was wrong, a line each."""
    problems = []
    for place in range(start, min(start + _FILES_PER_TASK, len(files))):
        problem = _decode(Path(files.path(place)), images[place])
        if problem:
            problems.append(f"{files.path(place)}: {problem}")
    return problems


def _decode(path: Path, into: npt.NDArray[np.uint8]) -> str:
    """Decode one image into an array (3, height, width); return what is wrong with it, or ""."""
    height, width = into.shape[1:]
    try:
        with pillow().open(path) as image:
            if image.size != (width, height):
                return f"it is {image.size[0]} x {image.size[1]}, not {width} x {height}"
            into[:] = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
    except Exception as error:  # what a decoder raises depends on what stands in the file
        return why_unreadable(error, path)
    return ""
