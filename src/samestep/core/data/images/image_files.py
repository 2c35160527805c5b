"""Find the image files of a data folder: `train/CLASS/…`, and `val/` and `test/` where given."""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from samestep.base.counting import counting
from samestep.base.errors import UserError, listed
from samestep.base.machine import usable_cores
from samestep.base.run.files import read_object, write_text
from samestep.core.data.images.decode import UnreadableImageError, decode
from samestep.launch.ranks.world import World

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
        return len(self.paths)

    def path(self, index: int) -> str:
        """Return the path of a file."""
        return os.path.join(self.root, self.name(index))  # noqa: PTH118 - once per sample

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
    """Return the classes of a data folder: the names of the folders in train/, sorted."""
    train = _split_folder(root, "train")
    if train is None:
        raise UserError(f"{root} has no folder train/. {_LAYOUT}.")
    names = _names(train, os.DirEntry.is_dir)
    for name in names:
        if not name.isprintable():
            raise UserError(
                f"{train} has a folder whose name is not valid text: {name!r}. Rename it: it is "
                "the name of a class."
            )
    if len(names) < 2:
        classes = f"one class only, {names[0]}/" if names else "no folders"
        raise UserError(f"{train} holds {classes}. {_LAYOUT}; at least two classes are needed.")
    return tuple(names)


def find_files(
    root: Path, split: str, classes: Sequence[str], *, whole: bool = False
) -> FileList | None:
    """Return the image files of a split, sorted by class and name; None if it has no folder.

    A file's label is the place of its folder's name among the classes. `whole`: every class of the
    split (`train`, `validation` or `test`) must have images, as it must in train/.
    """
    folder = _split_folder(root, split)
    if folder is None:
        return None
    if strange := sorted(set(_names(folder, os.DirEntry.is_dir)) - set(classes)):
        raise UserError(
            f"{folder / strange[0]} is not one of the classes ({listed(classes, 5)}). Rename the "
            "folder, or move it elsewhere."
        )
    names: list[bytes] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        there = (folder / name).is_dir()
        files = _names(folder / name, lambda e: e.name.lower().endswith(SUFFIXES)) if there else []
        if not files and (whole or split == "train"):
            raise _no_images(folder / name)
        names += [os.fsencode(os.path.join(folder.name, name, file)) for file in files]  # noqa: PTH118
        labels += [label] * len(files)
    if not names:
        raise _no_images(folder)
    return FileList(str(root), np.array(names, dtype=bytes), np.array(labels, np.int64))


def _split_folder(root: Path, split: str) -> Path | None:
    if not root.is_dir():
        problem = "is a file, not a folder" if root.exists() else "does not exist"
        raise UserError(f"The data folder {root} {problem}. {_LAYOUT}; name it with --data-dir.")
    there = [root / name for name in _FOLDERS[split] if (root / name).is_dir()]
    if len(there) > 1:
        raise UserError(f"{root} has both {there[0].name}/ and {there[1].name}/. Keep one of them.")
    return there[0] if there else None


def _names(folder: Path, wanted: Callable[[os.DirEntry[str]], bool]) -> list[str]:
    """Return the names in a folder that are wanted, sorted.

    Skipped is what macOS adds: ._cat.jpg next to cat.jpg, and a folder __MACOSX in an archive.
    """
    try:
        with os.scandir(folder) as entries:
            names = [e.name for e in entries if wanted(e)]
    except OSError as error:
        raise UserError(
            f"The folder {folder} cannot be read: {error.strerror}. Make it readable, or choose "
            "another with --data-dir."
        ) from error
    return sorted(name for name in names if not name.startswith((".", "__MACOSX")))


def _no_images(folder: Path) -> UserError:
    if not folder.is_dir():
        return UserError(
            f"There is no folder {folder}, and {folder.name} is one of the classes. Use the data "
            "that the classes come from; a new run reads the classes from its folders."
        )
    others = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    holds = f" (it holds {len(others)} other files, such as {others[0]})" if others else ""
    return UserError(
        f"{folder} has no images{holds}: no file in it ends in {', '.join(SUFFIXES)}. Fill the "
        "folder, or remove it if it is not a class."
    )


_FILES_PER_TASK = 32
_FILES_PER_DIGEST = 4096

Broken = dict[int, str]
"""Place of a file → why it cannot be read."""


def find_broken(files: FileList, side: int, world: World) -> Broken:
    """Return the files that cannot be decoded: the same on every rank, which all call it."""
    stamp = _stamp(files, side, world)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.sha256(os.path.realpath(files.root).encode()).hexdigest()[:16]
    memory = home / "samestep" / "images" / f"{name}.json"
    remembered = world.on_main(lambda: read_object(memory))
    if remembered.get("stamp") == stamp:
        return {int(place): str(why) for place, why in remembered.get("broken", {}).items()}
    mine = range(world.rank, len(files), world.world_size)
    broken = _decode_all(files, mine, side, world, lambda _place, _image: None)
    if world.is_main:
        # Where it cannot be written, the next run only reads the images once more.
        with contextlib.suppress(OSError, UserError):
            memory.parent.mkdir(parents=True, exist_ok=True)
            write_text(memory, json.dumps({"stamp": stamp, "broken": broken}) + "\n")
    return broken


def decode_into(files: FileList, images: Tensor, world: World) -> Broken:
    """Fill the memory of each node with its images; return what any rank could not decode.

    Every rank calls it and fills a part of its node's images (files, 3, side, side) uint8.
    """
    mine = range(world.local_rank, len(files), world.local_world_size)
    return _decode_all(files, mine, images.shape[-1], world, images.__setitem__)


def _decode_all(
    files: FileList, mine: range, side: int, world: World, keep: Callable[[int, Tensor], object]
) -> Broken:
    """Decode this rank's files in threads; return those of all ranks that cannot be decoded."""
    cores = usable_cores()
    neighbours = world.gather((world.node, cores)).count((world.node, cores))
    num_threads = max(1, len(cores) // neighbours)
    with counting("decoding images", len(mine), shown=world.is_main) as count:
        broken = decode_in_threads(
            files, mine, keep, lambda path: decode(path, side), num_threads, count
        )
    # The gather also makes every rank wait until all images are written.
    return _merge(world.gather(broken))


def decode_in_threads(
    files: FileList,
    places: range,
    keep: Callable[[int, Tensor], object],
    decode_one: Callable[[str], Tensor],
    num_threads: int,
    count: Callable[[int], object] = lambda _: None,
) -> Broken:
    """Decode some files and keep each by its place; return those that cannot be decoded."""

    def work(some: Sequence[int]) -> Broken:
        broken = {}
        for place in some:
            try:
                keep(place, decode_one(files.path(place)))
            except UnreadableImageError as error:
                broken[place] = str(error)
        count(len(some))
        return broken

    tasks = [places[k : k + _FILES_PER_TASK] for k in range(0, len(places), _FILES_PER_TASK)]
    with ThreadPoolExecutor(num_threads) as pool:
        return _merge(pool.map(work, tasks))


def _merge(parts: Iterable[Broken]) -> Broken:
    return dict(sorted(broken for part in parts for broken in part.items()))


def _stamp(files: FileList, side: int, world: World) -> str:
    """Return a digest of every file's path, size and time of change, the same on every rank."""
    starts = range(0, len(files), _FILES_PER_DIGEST)
    mine = {start: _digest(files, start) for start in starts[world.rank :: world.world_size]}
    digests = {start: digest for part in world.gather(mine) for start, digest in part.items()}
    whole = hashlib.sha256(f"1 {side} {len(files)}".encode())
    for start in starts:
        whole.update(digests[start])
    return whole.hexdigest()


def _digest(files: FileList, start: int) -> bytes:
    digest = hashlib.sha256()
    for place in range(start, min(start + _FILES_PER_DIGEST, len(files))):
        facts: tuple[object, ...] = ()
        with contextlib.suppress(OSError):  # the scan says what is wrong with it
            status = os.stat(files.path(place))  # noqa: PTH116 - once per file
            facts = (status.st_size, status.st_mtime_ns, status.st_mode)
        digest.update(repr((bytes(files.paths[place]), facts)).encode())
    return digest.digest()
