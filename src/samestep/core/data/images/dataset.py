"""Make image files ready on all ranks: what is broken left out, what fits kept in memory."""

import contextlib
import hashlib
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from samestep.base import words
from samestep.base.errors import UserError, listed
from samestep.base.machine import free_memory_bytes
from samestep.core.data.images.decode import UnreadableImageError, decode
from samestep.core.data.images.image_files import FileList, decode_into, find_broken
from samestep.core.recipe import InMemory
from samestep.launch.ranks.world import World

PREFIX = "samestep-images-"
_SPARE = 1.02
"""Free space required per byte of the file: a file system needs a little more."""


class NoRoomError(Exception):
    """The memory could not be had; the message says where and why."""


def map_shared(num_bytes: int, world: World) -> mmap.mmap:
    """Return zeroed memory that all ranks of a node write and read; every rank calls it.

    Raises:
        NoRoomError: on every rank, if a node has no room or a rank cannot reach its node's file.
    """
    if max(world.gather(world.local_world_size)) == 1:
        return mmap.mmap(-1, num_bytes)  # no process to share with
    created: list[Path] = []
    opened: list[tuple[int, mmap.mmap]] = []

    def agree(action: Callable[[], object]) -> None:
        """Act on this rank, and raise on every rank what any of them met."""
        problem = None
        try:
            action()
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            problem = f"{where}{error.strerror or error}"
        for text in world.gather(problem):
            if text is not None:
                raise NoRoomError(text)

    def reserve() -> None:
        if created:
            created[0].unlink(missing_ok=True)
            # Reserved now: a full file system would end a rank by SIGBUS when it writes.
            allocate = getattr(os, "posix_fallocate", lambda *_: None)
            allocate(opened[0][0], 0, num_bytes)

    try:
        agree(lambda: created.append(_create(num_bytes)) if world.local_rank == 0 else None)
        places = world.gather((world.node, created[0] if created else None))
        own = next(path for node, path in places if node == world.node and path is not None)
        agree(lambda: opened.append(_open(own, num_bytes)))
        agree(reserve)
    finally:
        for path in created:
            path.unlink(missing_ok=True)
        for descriptor, _memory in opened:
            os.close(descriptor)  # the mapping stays
    return opened[0][1]


def _create(num_bytes: int) -> Path:
    """Make the node's file where it fits: in memory, else in the temporary folder."""
    folders = [Path("/dev/shm"), Path(tempfile.gettempdir())]  # noqa: S108 - a mode-600 file
    for folder in folders:
        with contextlib.suppress(OSError):
            if shutil.disk_usage(folder).free >= num_bytes * _SPARE:
                descriptor, path = tempfile.mkstemp(prefix=PREFIX, dir=folder)
                os.close(descriptor)
                return Path(path)
    raise OSError(0, f"no room for {words.size(num_bytes)} in {folders[0]} or {folders[1]}")


def _open(path: Path, num_bytes: int) -> tuple[int, mmap.mmap]:
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.ftruncate(descriptor, num_bytes)  # the same on every rank of the node
        return descriptor, mmap.mmap(descriptor, num_bytes)
    except BaseException:
        os.close(descriptor)
        raise


Cache = Literal["auto", "memory", "off"]

_FREE_FRACTION = 0.5
"""What `auto` takes at most of a node's free memory: the rest is the training's."""
_PURPOSE = {"train": "train on", "validation": "validate with", "test": "test with"}


class ImageFiles(Dataset[Any]):
    """Each sample is (image (3, side, side) uint8, label), decoded anew at each reading."""

    def __init__(
        self, files: FileList, side: int, *, cache: Cache = "auto", max_corrupt: float = 0.0
    ) -> None:
        self.files, self._side = files, side
        self._cache, self._max_corrupt = cache, max_corrupt

    def __len__(self) -> int:
        return len(self.files)

    def read_batch(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Return images (batch, 3, side, side) and labels (batch,): the loader asks for these."""
        images = torch.empty((len(indices), 3, self._side, self._side), dtype=torch.uint8)
        for place, index in enumerate(indices):
            images[place] = self[index][0]
        return images, torch.from_numpy(self.files.labels[indices])

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path = self.files.path(index)
        try:
            return decode(path, self._side), int(self.files.labels[index])
        except UnreadableImageError as error:
            # Leaving it out now would change the order of samples on this rank only.
            raise UserError(
                f"{path} could be read when the run started, but not any more: {error}. Restore it "
                "and continue with --resume, or start a new run without it."
            ) from error

    def prepare_on_ranks(self, splits: Mapping[str, "ImageFiles"], world: World) -> dict[str, Any]:
        """Read all images of some splits once, on all ranks together; every rank calls it."""
        parts = [split.files for split in splits.values()]
        paths, labels = [part.paths for part in parts], [part.labels for part in parts]
        files = FileList(parts[0].root, np.concatenate(paths), np.concatenate(labels))
        _check_alike(files, world)
        images, note = _room(len(files), self._side, world, self._cache)
        if images is None:
            broken = find_broken(files, self._side, world)
        else:
            broken = decode_into(files, images, world)
        left_out = tuple(f"{files.shown(place)}: {why}" for place, why in broken.items())
        _check_broken(files, left_out, self._max_corrupt)
        readable = np.setdiff1d(np.arange(len(files)), list(broken))
        ends = np.cumsum([len(part) for part in parts])
        left = [
            files.take(some) for some in np.split(readable, np.searchsorted(readable, ends[:-1]))
        ]
        _check_left(splits, left)
        if images is not None and broken:
            if world.local_rank == 0:  # closes the gaps, once per node
                for place, source in enumerate(readable.tolist()):
                    if place != source:
                        images[place] = images[source]
            world.barrier()
        about = (
            f"{len(left_out):,} of {len(files):,} images cannot be read and are left out (recorded "
            f"in events.jsonl): {listed(left_out, between='; ')}."
        )
        notes = about if left_out else "", note
        ready: list[InMemory | ImageFiles]
        if images is None:
            ready = [ImageFiles(part, self._side) for part in left]
        else:
            views = torch.split(images[: len(readable)], [len(part) for part in left])
            ready = [(k, torch.from_numpy(p.labels)) for k, p in zip(views, left, strict=True)]
        named = dict(zip(splits, ready, strict=True))
        return {**named, "left_out": left_out, "notes": tuple(filter(None, notes))}


def _check_alike(files: FileList, world: World) -> None:
    """Check that all ranks see the same files; else each would number other samples."""
    digest = hashlib.sha256(b"\0".join(files.paths.tolist()))
    digest.update(files.labels.tobytes())
    by_rank = world.gather((len(files), digest.hexdigest()))
    if len(set(by_rank)) > 1:
        other = next(rank for rank, its in enumerate(by_rank) if its != by_rank[0])
        ours, theirs = by_rank[0][0], by_rank[other][0]
        raise UserError(
            f"Rank 0 sees {ours} image files and rank {other} sees "
            f"{theirs}{', with different names' if theirs == ours else ''}. Every node needs the "
            "same data folder, and no file may be added while a run starts.",
            on_all_ranks=True,
        )


def _room(num_files: int, side: int, world: World, cache: Cache) -> tuple[Tensor | None, str]:
    """Return shared memory for all images, or None, and what to tell the user of it."""
    if cache == "off":
        return None, ""
    num_bytes = num_files * 3 * side * side
    size = f"{num_files:,} images of 3 × {side} × {side} bytes, {words.size(num_bytes)}"
    free = [room for room in world.gather(free_memory_bytes()) if room is not None]
    limit = min(free, default=num_bytes * 4) * (_FREE_FRACTION if cache == "auto" else 1.0)
    if num_bytes > limit:
        problem = f"a node has {words.size(min(free))} free"
        problem += ", of which half is used at most" if cache == "auto" else ""
    else:
        try:
            memory = map_shared(num_bytes, world)
        except NoRoomError as error:
            problem = str(error)
        else:
            shared = ", once per node" if world.world_size > 1 else ""
            flat = torch.frombuffer(memory, dtype=torch.uint8)
            return flat.view(num_files, 3, side, side), f"Kept in memory{shared}: {size}."
    if cache == "memory":
        raise UserError(
            f"--cache memory: {size}, do not fit: {problem}. Use --cache off, a smaller "
            "--image-size, or a node with more memory.",
            on_all_ranks=True,
        )
    return None, f"Decoded in every epoch, not kept in memory: {size}; {problem}."


def _check_broken(files: FileList, left_out: tuple[str, ...], max_corrupt: float) -> None:
    if len(left_out) <= max_corrupt * len(files):
        return
    shown = listed([f"{files.root}/{each}" for each in left_out], between="\n  ")
    fraction = len(left_out) / len(files)
    power = 10 ** (1 - int(np.floor(np.log10(fraction))))  # rounded up to two digits
    raise UserError(
        f"{len(left_out):,} of {len(files):,} images cannot be read, more than --max-corrupt "
        f"{max_corrupt:g} allows:\n  {shown}\nReplace or delete them, or allow more: "
        f"--max-corrupt {min(1.0, np.ceil(fraction * power) / power):g}",
        on_all_ranks=True,
    )


def _check_left(splits: Mapping[str, ImageFiles], left: list[FileList]) -> None:
    """Check that every split has an image left, and in train/ every class."""
    for (name, split), whole in zip(splits.items(), left, strict=True):
        lost = set(split.files.labels.tolist()) - set(whole.labels.tolist())
        if len(whole) and (name != "train" or not lost):
            continue
        first = split.files.name(int(np.flatnonzero(split.files.labels == min(lost))[0]))
        what = f"of the class {Path(first).parent.name}/ " if len(whole) else ""
        raise UserError(
            f"None of the images {what}to {_PURPOSE[name]} can be read; the first is {first} in "
            f"{split.files.root}. Replace them, or remove their folder.",
            on_all_ranks=True,
        )
