"""The time line of a run: its attempts, on how many ranks, and what happened at which step."""

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass

from samestep.reporting.facts import last_step
from samestep.reporting.run_data import RunData
from samestep.reporting.table import Table, number, texts
from samestep.reporting.words import count
from samestep.run.records import Record

_MOST_MARKS = 300
_MOST_ROWS = 50


@dataclass(frozen=True, kw_only=True)
class Bar:
    """The steps of one attempt; its place is in per cent of all steps."""

    begin: float
    length: float
    label: str
    text: str
    """What is told of it when pointed at."""


@dataclass(frozen=True)
class Mark:
    """Something at one step; its place is in per cent of all steps."""

    kind: str
    """checkpoint, resume or stop."""
    place: float
    text: str


@dataclass(frozen=True, kw_only=True)
class TimeLine:
    """What happened, in the order of the steps."""

    summary: str
    bars: tuple[Bar, ...]
    marks: tuple[Mark, ...]
    last_step: int
    attempts: Table
    checkpoints: Table | None


@dataclass(kw_only=True)
class _Attempt:
    start: Record
    first: int = 0
    last: int = 0
    ended: str = ""
    resumed_from: str = ""
    changes: str = ""


def time_line(run: RunData) -> TimeLine | None:
    """Return a run's time line, None before its first start record."""
    attempts = _attempts(run)
    if not attempts:
        return None
    last = last_step(run)
    whole = max(last, 1)
    bars = []
    for one in attempts:
        size = count(one.start["world_size"], "rank")
        text = f"{size}, steps {one.first:,} to {one.last:,}; {one.ended}"
        length = 100 * (one.last - one.first) / whole
        bars.append(Bar(begin=100 * one.first / whole, length=length, label=size, text=text))
    saved = run.of("checkpoint")
    step = max(1, -(-len(saved) // _MOST_MARKS))
    marks = [
        Mark("checkpoint", 100 * r["step"] / whole, f"checkpoint, step {r['step']:,}")
        for r in saved[::-1][::step]
    ]
    for one in attempts:
        if one.resumed_from:
            text = f"resumed from {one.resumed_from} on {count(one.start['world_size'], 'rank')}"
            marks.append(Mark("resume", 100 * one.first / whole, text))
    return TimeLine(
        summary=_summary(attempts, len(saved), last),
        bars=tuple(bars),
        marks=tuple(marks),
        last_step=last,
        attempts=_table(attempts),
        checkpoints=_checkpoints(saved),
    )


def _attempts(run: RunData) -> list[_Attempt]:
    found: list[_Attempt] = []
    before: Record = {}
    for record in run.records:
        event = record["event"]
        if event == "start":
            if found:
                _close(found[-1], before, "killed, or lost")
            last = found[-1].last if found else 0
            found.append(_Attempt(start=record, first=last, last=last))
        elif found and event == "resume":
            found[-1].first = found[-1].last = record["step"]
            found[-1].resumed_from = str(record["checkpoint"])
            found[-1].changes = ", ".join(texts(record.get("changes")))
        elif found and event == "stop":
            found[-1].ended = str(record.get("reason", "stopped"))
        if isinstance(record.get("step"), int):
            before = record
    if found:
        _close(found[-1], before, run.status)
    return found


def _close(attempt: _Attempt, last: Record, ended: str) -> None:
    attempt.last = max(attempt.last, last.get("step", 0))
    attempt.ended = attempt.ended or ended


def _summary(attempts: Sequence[_Attempt], saved: int, last_step: int) -> str:
    sizes = [one.start["world_size"] for one in attempts]
    said = f"{count(last_step, 'step')}, {count(saved, 'checkpoint')}"
    if len(attempts) == 1:
        return f"{said}, in one go on {count(sizes[0], 'rank')}."
    told = ", then ".join(count(size, "rank") for size in sizes[:8])
    more = " …" if len(sizes) > 8 else ""
    again = count(len(attempts) - 1, "restart")
    return f"{said}, {again}: on {told}{more}."


def _table(attempts: Sequence[_Attempt]) -> Table:
    rows = []
    for place, one in enumerate(attempts, start=1):
        at = one.start.get("time")
        rows.append(
            (
                str(place),
                _moment(at) if isinstance(at, int | float) and 1e6 < at < 1e11 else "–",
                number(one.start["world_size"]),
                str(one.start.get("device", "–")),
                str(one.start.get("launcher", "–")),
                one.resumed_from or "the beginning",
                f"{one.first:,}–{one.last:,}",
                one.ended + (f"; changed: {one.changes}" if one.changes else ""),
            )
        )
    note = f"The last {_MOST_ROWS} of {len(rows):,}." if len(rows) > _MOST_ROWS else ""
    head = ("attempt", "began", "ranks", "device", "launcher", "from", "steps kept", "end")
    return Table(title="Attempts", columns=head, rows=tuple(rows[-_MOST_ROWS:]), note=note)


def _moment(seconds: float) -> str:
    at = dt.datetime.fromtimestamp(seconds, tz=dt.UTC).astimezone()
    return f"{at:%Y-%m-%d %H:%M:%S %Z}"


def _checkpoints(saved: Sequence[Record]) -> Table | None:
    if not saved:
        return None
    rows = [
        (
            r["path"].removeprefix("checkpoints/"),
            f"{r['step']:,}",
            number(r.get("seconds")),
            str(r.get("sha256") or "–")[:12],
        )
        for r in saved[-_MOST_ROWS:]
    ]
    note = f"The last {_MOST_ROWS} of {len(saved):,}." if len(saved) > _MOST_ROWS else ""
    head = ("file", "step", "seconds to save", "SHA-256")
    return Table(title="Checkpoints as they were saved", columns=head, rows=tuple(rows), note=note)
