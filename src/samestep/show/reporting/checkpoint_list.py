"""The checkpoints of a run as its index names them: a line each, and whether each is whole."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from samestep.base.errors import UserError
from samestep.base.run.directory import is_run, no_run
from samestep.base.run.index import Entry, Index, read_index, verify
from samestep.base.table import Table, text_lines
from samestep.base.words import measured, size

_COLUMNS = ("checkpoint", "step", "epoch", "metric", "size", "written", "")
_DROPPED = ("epoch", "written", "size", "metric")
"""Where the terminal is too narrow, columns go in this order."""


def listed_checkpoints(path: Path) -> list[dict[str, Any]]:
    """Return the checkpoints of a run, oldest first, as `samestep checkpoint list --json` does.

    Each has the fields of the index, `bytes` (null if a file is missing), `best` and `last`.

    Raises:
        UserError: the directory holds no run, or its index is damaged.
    """
    folder, index = _opened(path)
    best, last = index.best or index.last, index.last
    return [
        {
            **asdict(entry),
            "metric_name": index.monitor if entry.metric is not None else None,
            "bytes": _bytes(folder, entry),
            "best": entry == best,
            "last": entry == last,
        }
        for entry in sorted(index.checkpoints, key=lambda entry: entry.step)
    ]


def checked_checkpoints(path: Path) -> Iterator[dict[str, Any]]:
    """Hash the files of each checkpoint; yield its path, step, and `problem`, empty if whole.

    Raises:
        UserError: the directory holds no run, or its index is damaged.
    """
    folder, index = _opened(path)
    for entry in sorted(index.checkpoints, key=lambda entry: entry.step):
        problem = ""
        try:
            verify(folder, entry)
        except UserError as error:
            problem = str(error)
        yield {"path": entry.path, "step": entry.step, "problem": problem}


def checkpoint_lines(rows: Sequence[dict[str, Any]], width: int | None = None) -> Iterator[str]:
    """Yield the table of `listed_checkpoints`; without a width nothing is left out."""
    cells = [
        (
            row["path"],
            str(row["step"]),
            str(row["epoch"]),
            "" if row["metric"] is None else f"{row['metric_name']} {measured(row['metric'])}",
            "missing" if row["bytes"] is None else size(row["bytes"]),
            _when(row["time"]),
            ", ".join(name for name in ("best", "last") if row[name]),
        )
        for row in rows
    ]
    yield from text_lines(
        Table(columns=_COLUMNS, rows=cells, left=frozenset({"", "written"}), drop=_DROPPED), width
    )


def _opened(path: Path) -> tuple[Path, Index]:
    if not is_run(path):
        raise no_run(path)
    folder = path / "checkpoints"
    return folder, read_index(folder)


def _bytes(folder: Path, entry: Entry) -> int | None:
    """Return the size of all files of a checkpoint; None if one is missing."""
    try:
        return sum((folder / place).stat().st_size for place in (entry.path, *entry.files))
    except OSError:
        return None


def _when(seconds: float | None) -> str:
    """Return a time in the local time zone; nothing if earlier versions did not note it."""
    if seconds is None:
        return ""
    return f"{datetime.fromtimestamp(seconds, UTC).astimezone():%Y-%m-%d %H:%M}"
