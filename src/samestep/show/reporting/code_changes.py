"""What differs between the code of two runs: files, lines, and a unified diff.

A job keeps a copy of all its code, any other run a copy of its recipe's or its script's file, and
of what a recipe imports of the user's own.
"""

import difflib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from samestep.base.run.code_copy import CODE, kept_code
from samestep.base.run.code_pieces import differences, file_pieces, module_path
from samestep.base.run.own_modules import kept_modules

_LONGEST = 500_000
"""Bytes of a file that is still compared by line."""


@dataclass(frozen=True, kw_only=True)
class CodeChange:
    """A file that is not the same in two runs."""

    file: str
    change: Literal["edited", "new", "gone"]
    added: int = 0
    removed: int = 0
    diff: str = ""
    """Unified; empty where a file is not text, or too long."""
    functions: tuple[str, ...] = ()
    """Functions, classes and values that are not the same in both versions of a Python file."""

    @property
    def short(self) -> str:
        """Say it in a cell of a table."""
        lines = f"+{self.added} -{self.removed}" if self.diff else "other bytes"
        return lines if self.change == "edited" else f"{self.change}, {lines}"


def code_changes(one: Path, other: Path) -> list[CodeChange] | None:
    """Return what the other run's code has changed of the first's; None where one has no copy."""
    if kept_code(one) and kept_code(other):
        before, after = dict(_files(one / CODE)), dict(_files(other / CODE))
    else:
        kept = _main_file(one), _main_file(other)
        if kept[0] is None or kept[1] is None:
            return None
        name = next((path.name for path in kept if path and path.parent.name == CODE), kept[0].name)
        before, after = {name: kept[0]}, {name: kept[1]}
        modules = [found for run in (one, other) if (found := kept_modules(run)) is not None]
        if len(modules) == 2:
            for known, found in zip((before, after), modules, strict=True):
                known |= {module_path(*item): item[1] for item in found.files.items()}
    changes = (_change(name, before, after) for name in sorted({*before, *after}))
    return [change for change in changes if change is not None]


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield what was copied: what is only linked is data, and is not of the run."""
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names:
            path = Path(here, name)
            if path.is_file() and not path.is_symlink():
                yield path.relative_to(folder).as_posix(), path


def _main_file(run: Path) -> Path | None:
    entry = kept_code(run).get("file")
    files = [run / CODE / entry] if isinstance(entry, str) else []
    return next((f for f in (*files, run / "recipe.py", run / "script.py") if f.is_file()), None)


def _change(name: str, before: dict[str, Path], after: dict[str, Path]) -> CodeChange | None:
    old, new = (files[name].read_bytes() if name in files else None for files in (before, after))
    if old == new:
        return None
    change: Literal["edited", "new", "gone"] = "edited"
    if old is None or new is None:
        change = "new" if old is None else "gone"
    first, second = _lines(old), _lines(new)
    if first is None or second is None:
        return CodeChange(file=name, change=change)
    lines = [*difflib.unified_diff(first, second, f"a/{name}", f"b/{name}", lineterm="")]
    body = lines[2:]
    return CodeChange(
        file=name,
        change=change,
        added=sum(line.startswith("+") for line in body),
        removed=sum(line.startswith("-") for line in body),
        diff="\n".join(lines),
        functions=tuple(_functions(before[name], after[name])) if change == "edited" else (),
    )


def _functions(before: Path, after: Path) -> list[str]:
    is_python = before.suffix == after.suffix == ".py"
    return differences(file_pieces(before), file_pieces(after)) if is_python else []


def _lines(content: bytes | None) -> list[str] | None:
    """Return a file's lines; None where it is not text, or too long."""
    if not content:
        return []
    if len(content) > _LONGEST or b"\0" in content:
        return None
    try:
        return content.decode().removesuffix("\n").split("\n")
    except UnicodeDecodeError:
        return None
