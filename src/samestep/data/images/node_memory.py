"""Memory that the ranks of a node share: one mapped file without a name, so nothing is left.

The file is unlinked as soon as every rank of the node has it open and before a byte is written, so
the kernel frees it with the last process, also after SIGKILL. A kill within that moment leaves a
file without content.
"""

import contextlib
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from samestep.ranks.world import World

PREFIX = "samestep-images-"
_SPARE = 1.02
"""What a file system needs beside the bytes of a file."""


class NoRoomError(Exception):
    """The memory could not be had; the message says where and why."""


def map_shared(num_bytes: int, world: World) -> mmap.mmap:
    """Return zeroed memory that all ranks of a node write and read; every rank calls it.

    Raises:
        NoRoomError: on every rank, if a node has no room or a rank cannot reach its node's file.
    """
    if max(world.gather(world.local_world_size)) == 1:
        return mmap.mmap(-1, num_bytes)  # nobody to share with
    made: list[Path] = []
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
        if made:
            made[0].unlink(missing_ok=True)
            # Reserved now: a full file system would end a rank by SIGBUS when it writes.
            _reserve(opened[0][0], num_bytes)

    try:
        agree(lambda: made.append(_create(num_bytes)) if world.local_rank == 0 else None)
        places = world.gather((world.node, made[0] if made else None))
        own = next(path for node, path in places if node == world.node and path is not None)
        agree(lambda: opened.append(_open(own, num_bytes)))
        agree(reserve)
    finally:
        for path in made:
            path.unlink(missing_ok=True)
        for descriptor, _memory in opened:
            os.close(descriptor)  # the mapping stays
    return opened[0][1]


def _create(num_bytes: int) -> Path:
    """Make the node's file where it fits: in memory itself, else in the temporary folder."""
    folders = [Path("/dev/shm"), Path(tempfile.gettempdir())]  # noqa: S108 - a mode-600 file
    for folder in folders:
        with contextlib.suppress(OSError):
            if shutil.disk_usage(folder).free >= num_bytes * _SPARE:
                descriptor, path = tempfile.mkstemp(prefix=PREFIX, dir=folder)
                os.close(descriptor)
                return Path(path)
    raise OSError(0, f"no room for {num_bytes / 2**30:.2f} GiB in {folders[0]} or {folders[1]}")


def _open(path: Path, num_bytes: int) -> tuple[int, mmap.mmap]:
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.ftruncate(descriptor, num_bytes)  # the same on every rank of the node
        return descriptor, mmap.mmap(descriptor, num_bytes)
    except BaseException:
        os.close(descriptor)
        raise


def _reserve(descriptor: int, num_bytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, num_bytes)
