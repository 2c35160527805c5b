"""The row about output: no two ranks write the same file, and only rank 0 prints."""

import os
import sys
import sysconfig
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, cast

import torch

from samestep.base.errors import is_users
from samestep.base.words import count
from samestep.core.learner.side_effects import place_of, users_line
from samestep.prove.verification import causes
from samestep.prove.verification.evidence import Check, Evidence, TableRow

_COMPARED = "what ranks other than 0 print, write"
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT
# All ranks may try what only one can do: making or removing a folder, creating a new file.
_CHANGES = ("os.rename", "os.remove", "os.truncate")
_paths = sysconfig.get_paths()
_LIBRARIES = tuple(_paths[kind] + os.sep for kind in ("purelib", "platlib"))
_PYTHON = (*(_paths[kind] + os.sep for kind in ("stdlib", "platstdlib")), "<frozen ")
# Libraries that write a file which the user names; others, such as torch's caches, do not count.
_TOLD_TO = (
    *("torch/serialization.py", "numpy/", "pandas/", "PIL/", "matplotlib/"),
    *("torchvision/datasets/", "torchvision/utils.py"),
)


@dataclass
class RecipeOutput:
    """What the user's lines printed and wrote on one rank."""

    printed: dict[str, str] = field(default_factory=dict)
    """The user's line → the beginning of what it printed."""
    written: dict[str, str] = field(default_factory=dict)
    """File → the user's line that opened it for writing, renamed or removed it."""


def _one_writer(evidence: Evidence) -> Check:
    if not evidence.several:
        return Check("skipped", evidence.not_compared())
    written: dict[str, str] = {}
    printed: dict[str, str] = {}
    for reports in evidence.reports.values():
        outputs = [report.results.get(ONE_WRITER.name, RecipeOutput()) for report in reports]
        writers = Counter(path for output in outputs for path in output.written)
        for rank, output in enumerate(outputs):
            written |= {path: line for path, line in output.written.items() if writers[path] > 1}
            printed |= output.printed if rank else {}
    if written:
        path, line = next(iter(written.items()))
        others = f" and {count(len(written) - 1, 'more file')}" if len(written) > 1 else ""
        cause = causes.ALL_WRITE.of(line=line, files=f"{path}{others}")
        return Check("different", _COMPARED, cause=cause)
    if not printed:
        return Check("same", _COMPARED)
    line, text = next(iter(printed.items()))
    return Check("note", _COMPARED, cause=causes.ALL_PRINT.of(line=line, text=text))


ONE_WRITER = TableRow(name="one writer", answer=_one_writer)


def watch_output(folder: Path) -> RecipeOutput:
    """Watch this process from here to its end; writes below `folder` are samestep's."""
    output = RecipeOutput()
    own_folder, torch_save = str(folder), torch.save

    def note(file: object, frame: FrameType) -> None:
        if not isinstance(file, str | bytes | os.PathLike):
            return
        path = os.path.abspath(os.fsdecode(file))  # noqa: PTH100 - it may be anything
        if path.startswith((own_folder, "/dev/", "/proc/")) or "__pycache__" in path:
            return
        if line := line_that_writes(frame):
            output.written.setdefault(path, line)

    def audit(event: str, details: tuple[Any, ...]) -> None:
        flags = details[2] if event == "open" and isinstance(details[2], int) else 0
        if event in _CHANGES or (flags & _WRITES and not flags & os.O_EXCL):
            note(details[0], sys._getframe(1))  # noqa: SLF001

    @wraps(torch_save)
    def save(obj: object, f: Any, *more: Any, **named: Any) -> None:
        note(f, sys._getframe(1))  # noqa: SLF001 - C++ opens the file, which no audit sees
        torch_save(obj, f, *more, **named)

    sys.addaudithook(audit)
    torch.save = save
    sys.stdout = cast("TextIO", _WatchedStream(sys.stdout, output.printed))
    return output


def line_that_writes(frame: FrameType | None) -> str:
    """Return the user's line that caused a write, such as `model.py:31`, or "".

    Frames between the line and the write may be of libraries that write a named file. An import, a
    temporary file (which no other process shares) or a library with files of its own clears it.
    """
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users(file):
            return place_of(frame)
        # Without a virtual environment the libraries lie within Python's own folder.
        library = next((folder for folder in _LIBRARIES if file.startswith(folder)), None)
        is_expected = file.startswith(_PYTHON)
        if library:
            is_expected = file.removeprefix(library).startswith(_TOLD_TO)
        if "importlib" in file or file == tempfile.__file__ or not is_expected:
            return ""
        frame = frame.f_back
    return ""


class _WatchedStream:
    """Pass text on, and note which of the user's lines printed it."""

    def __init__(self, inner: TextIO, printed: dict[str, str]) -> None:
        self._inner, self._printed = inner, printed

    def write(self, text: str) -> int:
        line = users_line(sys._getframe(1))  # noqa: SLF001
        if line and text.strip():
            self._printed.setdefault(line, text.strip()[:60])
        return self._inner.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
