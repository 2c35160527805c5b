"""Find the image files of a data folder: `train/CLASS/…`, and `val/` and `test/` where given."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from samestep.errors import UserError, listed

SUFFIXES = (".jpg", ".jpeg", ".png")
_FOLDERS = {"train": ("train",), "validation": ("val", "validation"), "test": ("test",)}
_LAYOUT = "It must hold train/CLASS/*.jpg (.jpeg, .png), a folder for each class"


@dataclass(frozen=True)
class FileList:
    """Image files and the class of each, in a fixed order."""

    root: str
    """The folder that the paths are relative to."""
    paths: npt.NDArray[np.bytes_]
    """(files,), as the file system has them. One array, since a million Python strings would be
    copied into every loader worker as their reference counts change."""
    labels: npt.NDArray[np.int64]
    """(files,), places in the list of classes."""

    def __len__(self) -> int:
        """Return the number of files."""
        return len(self.paths)

    def path(self, index: int) -> str:
        """Return the path of a file."""
        return os.path.join(self.root, self.name(index))  # noqa: PTH118 - once a sample

    def name(self, index: int) -> str:
        """Return a file's path below the folder."""
        return os.fsdecode(self.paths[index])

    def shown(self, index: int) -> str:
        """Return the same as text for a message: what is not printable is escaped."""
        name = self.name(index)
        return name if name.isprintable() else repr(name)[1:-1]

    def take(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> "FileList":
        """Return some of the files, in the order given."""
        chosen = np.asarray(indices, dtype=np.int64)
        return FileList(self.root, self.paths[chosen], self.labels[chosen])


def class_names(root: Path) -> tuple[str, ...]:
    """Return the classes of a data folder: the names of the folders in train/, sorted.

    Raises:
        UserError: there is no such folder, or it holds fewer than two classes.
    """
    train = _split_folder(root, "train")
    if train is None:
        raise UserError(f"{root} has no folder train/. {_LAYOUT}.")
    names = _names(train, os.DirEntry.is_dir)
    for name in names:
        if not name.isprintable():
            raise UserError(
                f"{train} has a folder whose name is not text: {name!r}. Rename it: the name is "
                "that of a class."
            )
    if len(names) < 2:
        found = f"one class only, {names[0]}/" if names else "no folders"
        raise UserError(
            f"{train} holds {found}. {_LAYOUT}; two classes are the least to tell apart."
        )
    return tuple(names)


def find_files(
    root: Path, split: str, classes: Sequence[str], *, whole: bool = False
) -> FileList | None:
    """Return the image files of a split, sorted by class and name; None if it has no folder.

    A file's label is the place of its folder's name among the classes. `whole`: every class of the
    split (`train`, `validation` or `test`) must have images, as it must in train/.

    Raises:
        UserError: a folder cannot be read, a class is unknown, or one that must have images has
            none.
    """
    folder = _split_folder(root, split)
    if folder is None:
        return None
    strange = sorted(set(_names(folder, os.DirEntry.is_dir)) - set(classes))
    if strange:
        raise UserError(
            f"{folder / strange[0]} is none of the classes ({listed(classes, 5)}). Rename "
            "the folder, or move it elsewhere."
        )
    names: list[bytes] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = _names(folder / name, _is_image) if (folder / name).is_dir() else []
        if not found and (whole or split == "train"):
            raise _no_images(folder / name)
        names += [os.fsencode(os.path.join(folder.name, name, file)) for file in found]  # noqa: PTH118
        labels += [label] * len(found)
    if not names:
        raise _no_images(folder)
    return FileList(str(root), np.array(names, dtype=bytes), np.array(labels, np.int64))


def _split_folder(root: Path, split: str) -> Path | None:
    if not root.is_dir():
        what = "is a file, not a folder" if root.exists() else "does not exist"
        raise UserError(f"The data folder {root} {what}. {_LAYOUT}; name it with --data-dir.")
    there = [root / name for name in _FOLDERS[split] if (root / name).is_dir()]
    if len(there) > 1:
        raise UserError(f"{root} has both {there[0].name}/ and {there[1].name}/. Keep one of them.")
    return there[0] if there else None


def _is_image(entry: os.DirEntry[str]) -> bool:
    return entry.name.lower().endswith(SUFFIXES)


def _names(folder: Path, wanted: Callable[[os.DirEntry[str]], bool]) -> list[str]:
    """Return the names in a folder that are wanted, sorted.

    A leading dot marks what is not the user's: macOS leaves ._cat.jpg beside cat.jpg.
    """
    try:
        with os.scandir(folder) as entries:
            return sorted(e.name for e in entries if wanted(e) and not e.name.startswith("."))
    except OSError as error:
        raise UserError(
            f"The folder {folder} cannot be read: {error.strerror}. Make it readable for you, or "
            "name another with --data-dir."
        ) from error


def _no_images(folder: Path) -> UserError:
    if not folder.is_dir():
        return UserError(
            f"There is no folder {folder}, and {folder.name} is one of the classes. Use the data "
            "that the classes were taken from; a new run takes those of its folders."
        )
    others = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    holds = f" (it holds {len(others)} other files, such as {others[0]})" if others else ""
    return UserError(
        f"{folder} has no images{holds}: no file in it ends in {', '.join(SUFFIXES)}. Fill the "
        "folder, or remove it if it is no class."
    )
