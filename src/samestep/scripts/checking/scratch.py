"""A scratch copy of the user's files, in which a script may write what it likes.

`root` stands for `/`: the twin of a file is `root` and its absolute path. The project's small files
are copied. All else is linked, and a linked folder becomes one of links once something is written
into it. `guard.py` sends a rank's writes here.
"""

import contextlib
import fcntl
import os
import shutil
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

_MOST_COPIED = 1 << 20
_MOST_BYTES = 64 << 20
_MOST_FILES = 4_000
_WHOLE = {"node_modules", "venv", "env", "site-packages"}
"""Folders that are linked whole, as hidden ones are."""
_LINKS = "/.samestep-links"
"""Where a folder that was made has its links: next to those of the folders in it."""


class Scratch:
    """The scratch copy in a folder of its own, as the parent and each rank see it; real paths."""

    def __init__(self, place: Path, home: Path) -> None:
        self.place = str(place)
        self.home = str(home)
        self.root = f"{self.place}/root"
        self._made = f"{self.place}/made"
        """The folders of links that took the place of linked folders, by their real path."""
        self._lock = f"{self.place}/lock"
        self._known: set[str] = set()
        self._unmade: dict[str, int] = {}
        """Of folders that were not made, how many were made by then."""
        self.temporary = f"{self.place}/temporary"

    def twin(self, real: str | Path) -> str:
        """Return a real file's path in the scratch copy."""
        return f"{self.root}{real}"

    def real(self, path: str) -> str:
        """Return the real path of a file that may be named by its twin."""
        for prefix in (self.root, self._made):
            if path == prefix or path.startswith(prefix + os.sep):
                return path.removeprefix(prefix).replace(_LINKS, "", 1) or os.sep
        return path

    def shown(self, text: str) -> str:
        """Return a text in which files have their real names."""
        for prefix in (self.root, self._made):
            text = text.replace(prefix + os.sep, os.sep)
        return text.replace(_LINKS, "")

    def create(self, first: Path) -> None:
        """Copy the project, the folder `first` in it before the others."""
        for folder in (self.root, self._made, self.temporary):
            os.mkdir(folder)
        Path(self._lock).touch()
        self._link_above()
        left = _MOST_BYTES
        files = 0
        always = (os.path.realpath(first), self.home)
        waiting = deque(always)
        seen: set[str] = set()
        while waiting:
            folder_path = waiting.popleft()
            if folder_path in seen:
                continue
            seen.add(folder_path)
            try:
                entries = [*os.scandir(folder_path)]
            except PermissionError:
                entries = []
            files += len(entries)
            if files > _MOST_FILES and folder_path not in always:
                files -= len(entries)
                if not os.path.lexists(self.twin(folder_path)):
                    os.symlink(folder_path, self.twin(folder_path))
                continue
            os.makedirs(self.twin(folder_path), exist_ok=True)
            for entry in entries:
                hidden = entry.name.startswith(".") or entry.name in _WHOLE
                if entry.is_dir(follow_symlinks=False) and not hidden:  # copied with what it holds
                    waiting.append(entry.path)
                elif not os.path.lexists(self.twin(entry.path)):
                    left -= _copy_or_link(entry, self.twin(entry.path), left)

    def _link_above(self) -> None:
        """Link what is next to the project and the folders that it is in."""
        above = [*Path(self.home).parents][::-1]
        for outer, inside in pairwise([*above, Path(self.home)]):
            self._fill(str(outer), self.twin(outer).rstrip(os.sep), leave_out=inside.name)
            os.mkdir(self.twin(inside))

    def is_made(self, folder: str) -> bool:
        """Whether the twin of a real folder is a folder of the scratch copy, not a link out."""
        size = os.stat(self._lock).st_size  # grows with each folder that any rank makes
        if folder in self._known or self._unmade.get(folder) == size:
            return folder in self._known
        twin = os.path.realpath(self.twin(folder))
        if twin.startswith(self.place + os.sep) and os.path.isdir(twin):
            self._known.add(folder)
            return True
        if os.path.isdir(folder):  # else the script may still make it
            self._unmade[folder] = size
        return False

    def make(self, folder: str) -> None:
        """Let a real folder have a twin that may be written to: one of links to what it holds."""
        if self.is_made(folder) or not os.path.isdir(folder):
            return
        self.make(os.path.dirname(folder))
        with self.locked() as lock:
            if self.is_made(folder):
                return
            real = f"{self._made}{folder}{_LINKS}"
            os.makedirs(real, exist_ok=True)
            self._fill(folder, real)
            link = f"{self.place}/link-{os.getpid()}-{time.monotonic_ns()}"
            os.symlink(real, link)
            os.replace(link, self.twin(folder))
            os.write(lock, b".")

    def own(self, real: str) -> str:
        """Return the twin of a file, as a file that may be changed: a copy, if it was a link."""
        twin = self.twin(real)
        if not os.path.islink(twin) or os.path.realpath(twin).startswith(self.place + os.sep):
            return twin
        self.make(real)
        with self.locked():
            if os.path.isfile(twin) and os.path.islink(twin):
                copy = f"{self.place}/copy-{os.getpid()}-{time.monotonic_ns()}"
                shutil.copy2(os.path.realpath(twin), copy)
                os.replace(copy, twin)
        return twin

    def unlinked(self, path: Any) -> Any:
        """Return the target of a link that the scratch copy made; the script's own links stay."""
        text = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
        if not text.startswith(self.root + os.sep) or not os.path.islink(text):
            return path
        target = os.readlink(text)
        return target if self.real(target) == self.real(text) else path

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Let no other rank change what is linked."""
        lock = os.open(self._lock, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield lock
        finally:
            os.close(lock)

    @staticmethod
    def _fill(folder: str, target: str, leave_out: str = "") -> None:
        with contextlib.suppress(PermissionError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.name != leave_out:
                    with contextlib.suppress(FileExistsError):
                        os.symlink(entry.path, os.path.join(target, entry.name))


def _copy_or_link(entry: "os.DirEntry[str]", target: str, left: int) -> int:
    """Copy a small file, link anything else; return the bytes copied."""
    if entry.is_file(follow_symlinks=False):
        size = entry.stat().st_size
        if size <= min(_MOST_COPIED, left):
            with contextlib.suppress(PermissionError):
                shutil.copy2(entry.path, target)
                return size
    os.symlink(entry.path, target)
    return 0
