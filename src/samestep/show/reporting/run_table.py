"""Runs as a table, a line each, which fits the terminal; and as JSON."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from samestep.base.errors import printable
from samestep.base.run.summary import RunSummary
from samestep.base.table import Table, text_lines
from samestep.base.words import count, duration, measured, sparkline, wrapped

_ORDER = ("run", "recipe", "state", "best", "time", "began", "train loss", "last")
_DROPPED = ("recipe", "began", "last", "time", "train loss", "best")
"""Where the terminal is too narrow, columns go in this order: most names tell recipe and date."""
_DROPPED_BEFORE_NAMES = 3
"""Columns that go before the names are shortened."""
_MOST_DAMAGED = 5


def run_lines(runs: Sequence[RunSummary], width: int | None = None) -> Iterator[str]:
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


def _cells(run: RunSummary) -> tuple[str, ...]:
    best = "" if run.metric is None else f"{run.metric} {measured(run.value)}"
    return (
        printable(run.name),
        printable(run.recipe) or "–",
        run.state,
        printable(best) or "–",
        "–" if run.seconds is None else duration(run.seconds),
        (began(run) or "–")[:16].replace("T", " "),
        sparkline(run.losses) or "–",
        measured(run.losses[-1]) if run.losses else "–",
    )


def began(run: RunSummary) -> str | None:
    """Return when a run began, in the local time zone, as ISO 8601; None if it is not known."""
    try:
        started = math.nan if run.started is None else run.started
        return datetime.fromtimestamp(started, UTC).astimezone().isoformat(timespec="seconds")
    except (OverflowError, OSError, ValueError):
        return None


def as_json(run: RunSummary) -> dict[str, Any]:
    """Return a run as JSON has it: NaN and infinity, which it has not, are null."""
    losses = [loss if math.isfinite(loss) else None for loss in run.losses]
    return asdict(run) | {"run_dir": str(run.run_dir), "started": began(run), "losses": losses}
