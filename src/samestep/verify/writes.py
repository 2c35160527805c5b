"""What a recipe's own code prints, and writes to disk, on one rank."""

import io
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samestep.verify.hold import users_line

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT
_CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate")
_NOT_FILES = ("/dev/", "/proc/")


@dataclass
class Writes:
    """Of one rank."""

    printed: dict[str, str] = field(default_factory=dict)
    """The user's line → the beginning of what it printed."""
    written: dict[str, str] = field(default_factory=dict)
    """File → the user's line that opened it for writing, made, renamed or removed it."""


def watch_writes(folder: Path) -> Writes:
    """Watch this process from here to its end; what happens below a folder is ours."""
    found = Writes()
    own = str(folder)

    def audit(event: str, details: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(details[2], int) and details[2] & _WRITES
        if not writes and event not in _CHANGES:
            return
        if not isinstance(details[0], str | bytes | os.PathLike):
            return
        path = os.path.abspath(os.fsdecode(details[0]))  # noqa: PTH100 - it may be anything
        if path.startswith((own, *_NOT_FILES)) or "__pycache__" in path:
            return
        line = users_line(sys._getframe(1))  # noqa: SLF001
        if line:
            found.written.setdefault(path, line)

    sys.addaudithook(audit)
    sys.stdout = _Told(sys.stdout, found.printed)
    return found


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
