"""Memory that the ranks of a node share: one mapped file without a name, so nothing is left.

The file is unlinked as soon as every rank of the node has it open and before a byte is written, so
the kernel frees it with the last process, also after SIGKILL. A kill within that moment leaves a
file without content.
"""

import contextlib
import mmap
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from samestep.ranks.world import World

T = TypeVar("T")

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
    made: Path | None = None
    problem: str | None = None
    memory: mmap.mmap | None = None
    descriptor = -1
    try:
        if world.local_rank == 0:
            made, problem = _try(lambda: _create(num_bytes))
        places = world.gather((world.node, made, problem))
        _check([text for _, _, text in places])
        own = next(path for node, path, _ in places if node == world.node and path is not None)
        opened, problem = _try(lambda: _open(own, num_bytes))
        if opened is not None:
            descriptor, memory = opened
        _check(world.gather(problem))
        if made is not None:
            made.unlink(missing_ok=True)
            # Reserved now: a full file system would end a rank by SIGBUS when it writes.
            _, problem = _try(lambda: _reserve(descriptor, num_bytes))
        _check(world.gather(problem))
    finally:
        if made is not None:
            made.unlink(missing_ok=True)
        if descriptor >= 0:
            os.close(descriptor)  # the mapping stays
    assert memory is not None
    return memory


def _try(action: Callable[[], T]) -> tuple[T | None, str | None]:
    try:
        return action(), None
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return None, f"{where}{error.strerror or error}"


def _check(problems: list[str | None]) -> None:
    """Raise on every rank what any of them met."""
    said = [text for text in problems if text is not None]
    if said:
        raise NoRoomError(said[0])


def _create(num_bytes: int) -> Path:
    """Make the node's file where it fits: in memory itself, else in the temporary folder."""
    folders = [Path("/dev/shm"), Path(tempfile.gettempdir())]  # noqa: S108 - a mode-600 file
    for folder in folders:
        with contextlib.suppress(OSError):
            if shutil.disk_usage(folder).free < num_bytes * _SPARE:
                continue
            path = folder / f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            try:
                os.ftruncate(descriptor, num_bytes)
            except BaseException:
                path.unlink()
                raise
            finally:
                os.close(descriptor)
            return path
    raise OSError(0, f"no room for {num_bytes / 2**30:.2f} GiB in {folders[0]} or {folders[1]}")


def _open(path: Path, num_bytes: int) -> tuple[int, mmap.mmap]:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return descriptor, mmap.mmap(descriptor, num_bytes)
    except BaseException:
        os.close(descriptor)
        raise


def _reserve(descriptor: int, num_bytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, num_bytes)
