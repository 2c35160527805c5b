"""The runs of a folder and the checkpoints of a run: found, and shown as a table or JSON."""

import math
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from samestep.base.errors import UserError, printable
from samestep.base.nearby import nearby
from samestep.base.run.directory import is_run, no_run, read_summary
from samestep.base.run.files import open_regular
from samestep.base.run.index import Entry, Index, read_index, verify
from samestep.base.run.summary import State, Summary
from samestep.base.table import Table, text_lines
from samestep.base.words import count, duration, local_time, measured, size, sparkline, wrapped

Sort = Literal["name", "recipe", "state", "metric", "duration", "date"]

_MOST_INSIDE = 1000  # search at most this many entries of a folder for runs
_FILES = ("events.jsonl", "settings.toml", "result.json")
"""A folder without any of them holds no run."""


class ListedRun(Summary, kw_only=True):
    """A run in short, and where it is."""

    name: str  # the directory, relative to the folder that was listed
    run_dir: Path


def read_runs(folder: Path | str = "runs") -> list[ListedRun]:
    """Return the facts of each run in a folder, the newest first.

    Runs are also found in folders of it that are not runs themselves. Hidden entries are left out,
    and so are files like notes.txt and folders without a run.
    """
    folder = Path(folder)
    try:
        itself = is_run(folder) or (folder / "events.jsonl").is_file()
        entries = _entries(folder)
    except OSError as error:
        raise UserError(
            f"{folder} cannot be read: {error.strerror}. Name a folder with runs, such as runs/."
            f"{nearby(folder, 'runs')}"
        ) from error
    if itself:
        above = folder.absolute().parent if folder.name in ("", "..") else folder.parent
        raise UserError(f"{folder} is a run. Name the folder it is in: samestep runs {above}")
    return sorted_runs((run for name in entries for run in _runs_at(folder, name)), "date")


def sorted_runs(runs: Iterable[ListedRun], by: Sort) -> list[ListedRun]:
    """Return runs in an order: `metric` has the best first, `duration` the longest."""
    newest = sorted(runs, key=lambda run: -math.inf if run.started is None else run.started)
    newest.reverse()
    keys: dict[Sort, Callable[[ListedRun], Any]] = {
        "date": lambda _: 0,
        "duration": lambda run: -(run.seconds or 0.0),
        "metric": _rank,
        "state": lambda run: get_args(State).index(run.state),
        "name": lambda run: run.name,
        "recipe": lambda run: run.recipe,
    }
    return sorted(newest, key=keys[by])


def _rank(run: ListedRun) -> tuple[bool, str, float]:
    """Return a key for the best first; metrics of different names do not compare."""
    if run.value is None:
        return True, "", 0.0
    return False, run.metric or "", run.value if run.mode == "min" else -run.value


def _entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def _runs_at(folder: Path, name: str) -> Iterator[ListedRun]:
    """Yield the run of this name, or the runs in a folder of this name."""
    path = folder / name
    try:
        if not path.is_dir():
            path.stat()  # a link that leads nowhere, or to itself, raises here
            if not path.suffix:
                yield _damaged(name, path, "it is a file, not a directory")
        elif any((path / file).exists() for file in _FILES):
            yield from _listed(name, path)
        else:
            inside = _entries(path)
            if not inside:
                yield _damaged(name, path, "it is empty")
            for other in inside[:_MOST_INSIDE]:
                if is_run(path / other):
                    yield from _listed(f"{name}/{other}", path / other)
    except OSError as error:
        yield _damaged(name, path, f"it cannot be read: {error.strerror}")


def _damaged(name: str, path: Path, reason: str) -> ListedRun:
    return ListedRun(name=name, run_dir=path, state="damaged", reason=reason)


def _listed(name: str, path: Path) -> Iterator[ListedRun]:
    """Yield a run in short; but not what `samestep profile` wrote."""
    summary, damage = read_summary(path)
    if not summary.starts and (path / "profile.json").exists():
        return
    if not summary.recipe and (path / "settings.toml").is_file():  # it has not begun
        try:
            with open_regular(path / "settings.toml") as file:
                summary.recipe = str(tomllib.load(file).get("recipe") or "")
        except (OSError, ValueError, RecursionError):
            damage.append("settings.toml is damaged")
    summary.recipe = Path(summary.recipe).stem
    if summary.started is None:
        summary.started = path.stat().st_mtime
    if damage:
        summary.state, summary.reason = "damaged", damage[0]
    yield ListedRun(name=name, run_dir=path, **msgspec.structs.asdict(summary))


_ORDER = ("run", "recipe", "state", "best", "time", "began", "train loss", "last")
_DROPPED = ("recipe", "began", "last", "time", "train loss", "best")
"""Where the terminal is too narrow, columns go in this order: most names tell recipe and date."""
_DROPPED_BEFORE_NAMES = 3  # columns that go before the names are shortened
_MOST_DAMAGED = 5


def run_lines(runs: Sequence[ListedRun], width: int | None = None) -> Iterator[str]:
    """Yield the table of some runs; without a width, as for a file, nothing is left out."""
    damaged = sum(run.state == "damaged" for run in runs)
    hidden = width is not None and damaged > _MOST_DAMAGED
    shown = [run for run in runs if not (hidden and run.state == "damaged")]
    if shown:
        columns = list(zip(_ORDER, zip(*map(_cells, shown), strict=True), strict=True))
        columns = [(name, texts) for name, texts in columns if {*texts} != {"–"}]
        table = Table(
            columns=[name for name, _ in columns],
            rows=list(zip(*(texts for _, texts in columns), strict=True)),
            left=frozenset(_ORDER) - {"time", "last"},
            drop=_DROPPED,
            shorten_after=_DROPPED_BEFORE_NAMES,
        )
        yield from text_lines(table, width)
    if hidden:
        yield f"{count(damaged, 'damaged run')} not shown; --json lists them"
    elif width is not None:
        for run in shown:
            if run.state == "damaged":
                yield from wrapped(f"! {printable(run.name)}: {run.reason}", "  ", width)


def _cells(run: ListedRun) -> tuple[str, ...]:
    best = "" if run.metric is None else f"{run.metric} {measured(run.value)}"
    losses = [math.nan if loss is None else loss for loss in run.losses]
    return (
        printable(run.name),
        printable(run.recipe) or "–",
        run.state,
        printable(best) or "–",
        "–" if run.seconds is None else duration(run.seconds),
        (began(run) or "–")[:16].replace("T", " "),
        sparkline(losses) or "–",
        measured(losses[-1]) if losses else "–",
    )


def began(run: ListedRun) -> str | None:
    """Return when a run began, in the local time zone, as ISO 8601; None if it is not known."""
    try:
        started = math.nan if run.started is None else run.started
        return datetime.fromtimestamp(started, UTC).astimezone().isoformat(timespec="seconds")
    except (OverflowError, OSError, ValueError):
        return None


_SHOWN = (
    *("name", "run_dir", "recipe", "state", "reason", "metric", "mode", "value", "seconds"),
    *("epochs", "steps", "world_size", "started", "losses"),
)


def as_json(run: ListedRun) -> dict[str, Any]:
    """Return a run as JSON has it."""
    shown = {name: getattr(run, name) for name in _SHOWN}
    return shown | {"run_dir": str(run.run_dir), "started": began(run), "losses": [*run.losses]}


_COLUMNS = ("checkpoint", "step", "epoch", "metric", "size", "written", "")
_FIRST_DROPPED = ("epoch", "written", "size", "metric")
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
            "" if row["time"] is None else local_time(row["time"]),
            ", ".join(name for name in ("best", "last") if row[name]),
        )
        for row in rows
    ]
    yield from text_lines(
        Table(columns=_COLUMNS, rows=cells, left=frozenset({"", "written"}), drop=_FIRST_DROPPED),
        width,
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
