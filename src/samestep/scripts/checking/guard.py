"""Keep a script from changing existing files: what it writes goes into the scratch copy.

Paths that are given to Python's own functions, `torch.save` or `torch.load` are replaced by those
in the copy. A C library that opens an absolute path outside the project is not caught.
"""

import builtins
import errno
import io
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from samestep.base.patches import Patch, patched
from samestep.scripts.checking.scratch import Scratch

_READS = (
    *("stat", "statvfs", "listdir", "scandir", "access", "chdir"),
    *("readlink", "listxattr", "getxattr"),
)
_REMOVES = ("remove", "unlink")
_CHANGES = ("truncate", "utime", "chmod", "chown", "mkdir", "setxattr")
_MOVES = ("rename", "replace")
_FREE = re.compile("/(proc|sys|dev(?!/shm))/")
_TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm", tempfile.gettempdir())
_CACHES = tuple(
    os.path.realpath(os.path.expanduser(place)) + os.sep
    for place in ("~/.cache", *map(os.environ.get, ("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME")))
    if place
)
"""What libraries keep there can be made again, and some of them write it in C."""
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

_inside = threading.local()
"""Whether this thread asks for paths of its own: of all guards, as a forked rank has two."""


class Guard:
    """Which path a script's own one stands for."""

    def __init__(self, scratch: Scratch, began: float, *, temporary: bool) -> None:
        self._scratch = scratch
        self._frees_temporary = temporary
        self._began = began
        """Files that are newer were made by this run, and are the script's own."""
        self._folders: dict[str, str] = {}
        """The real paths of folders, until a link may lead elsewhere."""

    def patches(self) -> list[Patch]:
        """Return the functions to patch, with their replacements."""
        replaced = ((self.read, _READS), (self.write, _CHANGES), (self.remove, _REMOVES))
        return [
            *(
                (os, name, self._around_one(replace))
                for replace, names in replaced
                for name in names
                if hasattr(os, name)
            ),
            *((os, name, self._around_two(self.remove)) for name in _MOVES),
            (os, "link", self._around_two(self.write)),
            (os, "symlink", self._around_two(lambda target: target)),
            (os, "lstat", self._around_one(lambda path: self._scratch.unlinked(self.read(path)))),
            (os, "rmdir", self._rmdir),
            (builtins, "open", self._open),
            (io, "open", self._open),
            (os, "open", self._os_open),
            (torch.serialization, "_open_zipfile_writer", self._around_one(self.write)),
            (torch, "load", lambda load, f, *a, **kw: load(self._replaced(self.read, f), *a, **kw)),
        ]

    def read(self, path: Any) -> Any:
        """Return the path to read a file from: its twin, if it has one of its own."""
        real = self._real(path)
        if real is None or not self._scratch.is_made(os.path.dirname(real)):
            return path
        twin = self._scratch.twin(real)
        return path if not os.path.lexists(twin) and self._is_new(real) else twin

    def write(self, path: Any) -> Any:
        """Return the path to write a file to, with its contents."""
        return path if (real := self._to_change(path)) is None else self._scratch.own(real)

    def remove(self, path: Any) -> Any:
        """Return the path to remove, or to replace."""
        self._folders.clear()
        return path if (real := self._to_change(path)) is None else self._scratch.twin(real)

    def _to_change(self, path: Any) -> str | None:
        """Return the real path of what may be changed by its twin only; None if it is free."""
        real = self._real(path)
        if real is None:
            return None
        scratch = self._scratch
        folder = os.path.dirname(real)
        temporary = self._frees_temporary and any(
            real.startswith(place + os.sep) for place in _TEMPORARY
        )
        if temporary and not (real + os.sep).startswith(scratch.home + os.sep):
            twin = scratch.is_made(folder) and os.path.lexists(scratch.twin(real))
            if not twin and (not os.path.lexists(real) or self._is_new(real)):
                return None
        scratch.make(folder)
        return real

    def _real(self, path: Any) -> str | None:
        """Return the path of the file that a twin stands for; None for what is not a file of it."""
        try:
            text = os.fsdecode(path)
        except TypeError:  # a file, or its number
            return None
        folder, name = os.path.split(os.path.abspath(text))
        if folder not in self._folders:
            self._folders[folder] = self._scratch.real(os.path.realpath(folder))
        real = os.path.join(self._folders[folder], name)
        own = real.startswith(self._scratch.place + os.sep)
        return None if own or _FREE.match(real) or real.startswith(_CACHES) else real

    def _is_new(self, real: str) -> bool:
        try:
            return os.lstat(real).st_ctime >= self._began
        except OSError:
            return False

    def _replaced(self, replace: Callable[[Any], Any], path: Any, folder: int | None = None) -> Any:
        """Return the path to use instead; a relative one may be of an open folder."""
        if getattr(_inside, "busy", False):
            return path
        _inside.busy = True
        try:
            if folder is not None and not os.path.isabs(path):
                path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), os.fsdecode(path))
            replaced = replace(path)
            return os.fsencode(replaced) if isinstance(path, bytes) else replaced
        finally:
            _inside.busy = False

    def _around_one(self, replace: Callable[[Any], Any]) -> Callable[..., Any]:
        def around(original: Callable[..., Any], path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            folder = kwargs.pop("dir_fd", None)
            return original(self._replaced(replace, path, folder), *args, **kwargs)

        return around

    def _around_two(self, replace_first: Callable[[Any], Any]) -> Callable[..., Any]:
        def around(
            original: Callable[..., Any],
            src: Any,
            dst: Any,
            *args: Any,
            src_dir_fd: int | None = None,
            dst_dir_fd: int | None = None,
            **kwargs: Any,
        ) -> Any:
            src = self._replaced(replace_first, src, src_dir_fd)
            dst = self._replaced(self.remove, dst, kwargs.pop("dir_fd", dst_dir_fd))
            self._folders.clear()
            return original(src, dst, *args, **kwargs)

        return around

    def _rmdir(self, original: Callable[..., Any], path: Any, dir_fd: int | None = None) -> None:
        def remove(path: Any) -> Any:
            link = self.remove(path)
            folder = self._scratch.unlinked(link)
            if folder == link:
                original(link)
            elif os.listdir(folder):
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
            else:
                os.unlink(link)
            return link

        self._replaced(remove, path, dir_fd)

    def _open(
        self, original: Callable[..., Any], file: Any, mode: str = "r", *args: Any, **kwargs: Any
    ) -> Any:
        writes = isinstance(mode, str) and not {*"wax+"}.isdisjoint(mode)
        file = self._replaced(self.write if writes else self.read, file)
        return original(file, mode, *args, **kwargs)

    def _os_open(
        self,
        original: Callable[..., Any],
        path: Any,
        flags: int,
        *args: Any,
        dir_fd: int | None = None,
        **kwargs: Any,
    ) -> Any:
        replace = self.write if flags & _WRITE_FLAGS else self.read
        return original(self._replaced(replace, path, dir_fd), flags, *args, **kwargs)


@contextmanager
def guarding(scratch: Scratch, began: float, *, temporary: bool = True) -> Iterator[None]:
    """Guard the user's files while inside; with `temporary`, new temporary files are free."""
    # Removing a tree by open folders would compare a folder with its twin.
    by_folders = shutil._use_fd_functions  # type: ignore[attr-defined]  # noqa: SLF001
    shutil._use_fd_functions = False  # type: ignore[attr-defined]  # noqa: SLF001
    try:
        with patched(*Guard(scratch, began, temporary=temporary).patches()):
            yield
    finally:
        shutil._use_fd_functions = by_folders  # type: ignore[attr-defined]  # noqa: SLF001
