"""What a recipe's own code prints, and writes to disk, on one rank."""

import io
import os
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from samestep.verification.randomness import is_users, place_of, users_line

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT
# What only one rank can succeed at (a folder that is made or removed, a file that must be new) is
# no file that several write; where it is no mistake to come second, all try.
_CHANGES = ("os.rename", "os.remove", "os.truncate")
_NOT_FILES = ("/dev/", "/proc/")
_paths = sysconfig.get_paths()
_LIBRARIES = tuple(_paths[kind] + os.sep for kind in ("purelib", "platlib"))
_PYTHON = (*(_paths[kind] + os.sep for kind in ("stdlib", "platstdlib")), "<frozen ")
# Libraries that write the file that they are told to. All others look after their own files:
# what torch caches when it is first needed is not for the user to mend.
_TOLD_TO = (
    *("torch/serialization.py", "numpy/", "pandas/", "PIL/", "matplotlib/"),
    "torchvision/datasets/",
)


@dataclass
class Writes:
    """Of one rank."""

    printed: dict[str, str] = field(default_factory=dict)
    """The user's line → the beginning of what it printed."""
    written: dict[str, str] = field(default_factory=dict)
    """File → the user's line that opened it for writing, renamed or removed it."""


def watch_writes(folder: Path) -> Writes:
    """Watch this process from here to its end; what happens below a folder is ours."""
    found = Writes()
    own = str(folder)

    def audit(event: str, details: tuple[Any, ...]) -> None:
        flags = details[2] if event == "open" and isinstance(details[2], int) else 0
        writes = flags & _WRITES and not flags & os.O_EXCL
        if not writes and event not in _CHANGES:
            return
        if not isinstance(details[0], str | bytes | os.PathLike):
            return
        path = os.path.abspath(os.fsdecode(details[0]))  # noqa: PTH100 - it may be anything
        if path.startswith((own, *_NOT_FILES)) or "__pycache__" in path:
            return
        line = line_that_writes(sys._getframe(1))  # noqa: SLF001
        if line:
            found.written.setdefault(path, line)

    sys.addaudithook(audit)
    sys.stdout = _Told(sys.stdout, found.printed)
    return found


def line_that_writes(frame: FrameType | None) -> str:
    """Return the user's line whose doing a write is: `model.py:31`; nothing if it is no line's.

    Between the line and the write may stand what writes where it is told to, but no import, no
    temporary file (which no other process shares), and no library with files of its own.
    """
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users(file):
            return place_of(frame)
        if "importlib" in file or file == tempfile.__file__ or not _writes_where_told(file):
            return ""
        frame = frame.f_back
    return ""


def _writes_where_told(file: str) -> bool:
    # Without a virtual environment the libraries lie within Python's own folder.
    for folder in _LIBRARIES:
        if file.startswith(folder):
            return file.removeprefix(folder).startswith(_TOLD_TO)
    return file.startswith(_PYTHON)


class _Told(io.TextIOBase):
    """Pass text on, and note which of the user's lines printed it."""

    def __init__(self, inner: Any, printed: dict[str, str]) -> None:
        self._inner, self._printed = inner, printed

    def write(self, text: str) -> int:
        line = users_line(sys._getframe(1))  # noqa: SLF001
        if line and text.strip():
            self._printed.setdefault(line, text.strip()[:60])
        count: int = self._inner.write(text)
        return count

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return getattr(self._inner, name)  # type: ignore[no-any-return]

    def flush(self) -> None:
        self._inner.flush()

    def fileno(self) -> int:
        number: int = self._inner.fileno()
        return number
