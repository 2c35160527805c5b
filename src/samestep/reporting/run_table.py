"""Runs as a table, a line each, which fits the terminal; and as JSON."""

import math
import unicodedata
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from samestep.reporting.words import count, duration, sparkline, wrapped
from samestep.run.summary import RunSummary

_GAP = "  "
_LEAST_NAME = 16
_ORDER = ("run", "recipe", "state", "best", "time", "began", "train loss", "last")
_DROPPED = ("recipe", "began", "last", "time", "train loss", "best")
"""Where the table is too wide, columns go in this order: most names tell recipe and date."""
_NAME_BEFORE = 3
"""So many columns go before the names are shortened."""
_RIGHT = ("time", "last")
_MOST_DAMAGED = 5


def run_lines(runs: Sequence[RunSummary], width: int | None = None) -> Iterator[str]:
    """Yield the table of some runs.

    Args:
        runs: in the order of the table.
        width: columns of the terminal; None of a file or a pipe, where nothing is left out.
    """
    damaged = sum(run.state == "damaged" for run in runs)
    hidden = width is not None and damaged > _MOST_DAMAGED
    shown = [run for run in runs if not (hidden and run.state == "damaged")]
    if shown:
        rows = [dict(zip(_ORDER, _cells(run), strict=True)) for run in shown]
        yield from _table([dict(zip(_ORDER, _ORDER, strict=True)), *rows], width)
    if hidden:
        yield f"{count(damaged, 'damaged run')} not shown; --json lists them"
    elif width is not None:
        for run in shown:
            if run.state == "damaged":
                yield from wrapped(f"! {printable(run.name)}: {run.reason}", "  ", width)


def _cells(run: RunSummary) -> tuple[str, ...]:
    best = "" if run.metric is None else f"{run.metric} {_number(run.value)}"
    return (
        printable(run.name),
        printable(run.recipe) or "–",
        run.state,
        printable(best) or "–",
        "–" if run.seconds is None else duration(run.seconds),
        (began(run) or "–")[:16].replace("T", " "),
        sparkline(run.losses) or "–",
        _number(run.losses[-1]) if run.losses else "–",
    )


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{value}"
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 or value == 0 else f"{value:.2e}"


def began(run: RunSummary) -> str | None:
    """Return when a run began, in the local time zone, as ISO 8601; None if it is not known."""
    try:
        moment = datetime.fromtimestamp(
            math.nan if run.started is None else run.started
        ).astimezone()
    except (OverflowError, OSError, ValueError):
        return None
    return moment.isoformat(timespec="seconds")


def _table(rows: list[dict[str, str]], width: int | None) -> Iterator[str]:
    """Yield rows of which the first are headings; columns are dropped until they fit."""
    columns = [name for name in _ORDER if any(row[name] != "–" for row in rows[1:])]
    widths = {name: max(cells(row[name]) for row in rows) for name in columns}
    if width is not None:
        for place, name in enumerate((*_DROPPED, None)):
            over = sum(widths.values()) + len(_GAP) * (len(widths) - 1) - width
            if over <= 0:
                break
            room = widths["run"] - over
            if place >= _NAME_BEFORE and (room >= _LEAST_NAME or name is None):
                widths["run"] = max(room, 1)
                break
            widths.pop(name or "", None)
    for row in rows:
        words = [_fitted(row[name], n, right=name in _RIGHT) for name, n in widths.items()]
        yield _GAP.join(words).rstrip()


def _fitted(text: str, width: int, *, right: bool) -> str:
    """Return a text in so many columns; one that is longer loses its middle."""
    head = tail = ""
    if cells(text) > width:
        while text and cells(head + text[0]) <= (width - 1) // 2:
            head, text = head + text[0], text[1:]
        while text and cells(text[-1] + tail) <= width - 1 - cells(head):
            tail, text = text[-1] + tail, text[:-1]
        text = f"{head}…{tail}"
    space = " " * (width - cells(text))
    return space + text if right else text + space


def cells(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    return len(text) + wide - sum(map(bool, map(unicodedata.combining, text)))


def printable(text: str) -> str:
    """Return a text without what would move the cursor or cannot be encoded."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def as_json(run: RunSummary) -> dict[str, Any]:
    """Return a run as JSON has it: NaN and infinity, which it has not, are null."""
    return {
        "name": run.name,
        "run_dir": str(run.run_dir),
        "recipe": run.recipe,
        "state": run.state,
        "reason": run.reason,
        "metric": run.metric,
        "mode": run.mode,
        "value": run.value,
        "seconds": run.seconds,
        "epochs": run.epochs,
        "steps": run.steps,
        "world_size": run.world_size,
        "started": began(run),
        "losses": [loss if math.isfinite(loss) else None for loss in run.losses],
    }
