"""Sections of a run's page: its step's phases, its ranks, its time line, its classes."""

import datetime as dt
import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from samestep.base.run.records import COMPUTE, WAITS, Record
from samestep.base.table import Table, texts
from samestep.base.words import count, number, percent
from samestep.show.reporting.curves import measured_epochs, pauses, phases
from samestep.show.reporting.facts import last_step
from samestep.show.reporting.plot import confusion_of
from samestep.show.reporting.run_data import RunData

_GROUPS = {
    "compute": (COMPUTE, "computing", "computing"),
    "waits": (WAITS, "its input: steps wait for data", "waiting for data"),
    "all_reduce": (
        ("all_reduce",),
        "communication: steps wait for other ranks",
        "the all-reduce that backward does not hide",
    ),
    "other": (("other",), "the loop's own work between the phases", "the rest"),
}
"""Group → its phases, what it bounds a training by, and what takes the time."""
_STRAGGLES = 0.15
"""As `samestep profile`: below this share of a step, ranks only take turns at being last."""
_MOST_RANKS = 64


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """A step's phases as a table, and what they mean."""

    bound: str
    """The group that takes most of a step: compute, waits, all_reduce or other."""
    verdict: str
    table: Table
    between: Table | None  # evaluations, checkpoints and compiling


def step_time(run: RunData) -> StepTime | None:
    """Return the mean phases of a step over all epochs but the first, None if not recorded."""
    phase_ms = phases(run) or {}
    total_ms = sum(phase_ms.values())
    if total_ms <= 0:
        return None
    rows = [(name, number(ms), percent(ms / total_ms)) for name, ms in phase_ms.items()]
    stops = [(k, number(v["count"]), number(v["seconds"])) for k, v in pauses(run).items()]
    spent = {
        group: sum(phase_ms.get(name, 0.0) for name in names)
        for group, (names, _, _) in _GROUPS.items()
    }
    order = sorted(spent, key=lambda group: -spent[group])
    parts = ", ".join(f"{n} {percent(phase_ms[n] / total_ms)}" for n in COMPUTE if phase_ms.get(n))
    shares = "; ".join(
        f"{_GROUPS[group][2]} takes {percent(spent[group] / total_ms)}"
        + (f" of a step ({parts})" if group == "compute" else "")
        for group in order
        if spent[group] > 0
    )
    return StepTime(
        bound=order[0],
        verdict=f"The training is bound by {_GROUPS[order[0]][1]}. "
        f"A step takes {number(total_ms)} ms: {shares}.",
        table=Table(
            title="Mean of a step on rank 0, without the first epoch if there are more",
            columns=("phase", "ms", "share"),
            rows=[*rows, ("total", number(total_ms), "100 %")],
        ),
        between=Table(title="Between the steps", columns=("", "count", "seconds"), rows=stops)
        if stops
        else None,
    )


@dataclass(frozen=True, kw_only=True)
class RankByRank:
    """What each rank did of a step, and whether one of them holds up the others."""

    verdict: str
    bars: list[tuple[int, list[tuple[str, float, float]]]]
    """Each rank with (name, begin, length) of its parts, in per cent of the longest bar."""
    table: Table


def rank_by_rank(run: RunData) -> RankByRank | None:
    """Return each rank's milliseconds of a step, None for one rank or if not recorded.

    Where the number of ranks changed, it is of the latest one.
    """
    size = run.plan.get("world_size", 0)
    epochs = [r for r in measured_epochs(run) if _has_columns(r.get("ranks"), size)]
    if not epochs or size < 2:
        return None
    # Each rank counts its seconds since the start of the epoch, or since a resume within it.
    begun, steps = [r["step"] for r in run.of("resume")], 0
    for record in epochs:
        latest = [step for step in begun if step < record["step"]][-1:]
        steps += min([record["num_steps"], *(record["step"] - step for step in latest)])
    names = list(epochs[0]["ranks"])
    none = [0.0] * size
    ms = [
        {n: 1000 * sum(r["ranks"].get(n, none)[rank] for r in epochs) / steps for n in names}
        for rank in range(size)
    ]
    longest = max(sum(row.values()) for row in ms) or 1.0
    own = [sum(value for name, value in row.items() if name != "all_reduce") for row in ms]
    shown = sorted(sorted(range(size), key=lambda rank: -own[rank])[:_MOST_RANKS])
    bars = []
    for rank in shown:
        lengths = [100 * value / longest for value in ms[rank].values()]
        begins = itertools.accumulate(lengths, initial=0.0)
        parts = zip(names, begins, lengths, strict=False)
        bars.append((rank, [(name, round(at, 3), round(long, 3)) for name, at, long in parts]))
    return RankByRank(
        verdict=_straggler(own, longest),
        bars=bars,
        table=Table(
            title="Milliseconds of a step on each rank",
            columns=("", *names),
            rows=[(f"rank {k}", *(number(ms[k][name]) for name in names)) for k in shown],
            note=f"The slowest 64 of {count(size, 'rank')}." if size > _MOST_RANKS else "",
        ),
    )


def _has_columns(ranks: Any, size: int) -> bool:
    return isinstance(ranks, dict) and all(
        isinstance(column, list)
        and len(column) == size
        and all(isinstance(seconds, int | float) for seconds in column)
        for column in ranks.values()
    )


def _straggler(own: list[float], step: float) -> str:
    """Say which rank holds up the others, by the time that each works or waits for its data."""
    usual = statistics.median(own)
    slowest = max(range(len(own)), key=lambda rank: own[rank])
    facts = (
        f"Rank {slowest} takes {number(own[slowest])} ms of a step for data and computing, the "
        f"median rank {number(usual)} ms"
    )
    if own[slowest] - usual < _STRAGGLES * step:
        return f"No rank slows down the others. {facts}."
    waits = "all ranks wait for it in the all-reduce"
    return f"Rank {slowest} slows down the others: {waits}. {facts}."


_MOST_MARKS = 300
_MOST_ATTEMPTS = 50


class Bar(NamedTuple):
    """The steps of one attempt, in per cent of all steps, and what is shown when pointed at."""

    begin: float
    length: float
    label: str
    text: str


class Mark(NamedTuple):
    """A checkpoint or a resume; its place is in per cent of all steps."""

    kind: str
    place: float
    text: str


@dataclass(frozen=True, kw_only=True)
class TimeLine:
    """A run's attempts, on how many ranks each, and what happened at which step."""

    summary: str
    bars: list[Bar]
    marks: list[Mark]
    last_step: int
    attempts: Table
    checkpoints: Table | None


@dataclass(kw_only=True)
class _Attempt:
    start: Record
    first: int
    last: int
    ended: str = ""
    resumed_from: str = ""
    changes: str = ""

    @property
    def ranks(self) -> str:
        return count(self.start["world_size"], "rank")

    def close(self, last: Record, ended: str) -> None:
        self.last = max(self.last, last.get("step", 0))
        self.ended = self.ended or ended

    @property
    def origin(self) -> str:
        """Where it began: a checkpoint, or the end of a run that was finished."""
        ended = self.start.get("resumed") and self.first
        return self.resumed_from or ("the end" if ended else "the beginning")

    def row(self) -> tuple[str, ...]:
        at = self.start.get("time")
        began = "–"
        if isinstance(at, int | float) and 1e6 < at < 1e11:
            moment = dt.datetime.fromtimestamp(at, tz=dt.UTC).astimezone()
            began = f"{moment:%Y-%m-%d %H:%M:%S %Z}"
        return (
            began,
            number(self.start["world_size"]),
            str(self.start.get("device", "–")),
            str(self.start.get("launcher", "–")),
            self.origin,
            f"{self.first:,}–{self.last:,}" if self.last > self.first else "none",
            self.ended + (f"; changed: {self.changes}" if self.changes else ""),
        )


def time_line(run: RunData) -> TimeLine | None:
    """Return a run's time line, None before its first start record."""
    attempts = _attempts(run)
    if not attempts:
        return None
    last = last_step(run)
    whole = max(last, 1)
    bars = []
    for a in attempts:
        text = f"{a.ranks}, steps {a.first:,} to {a.last:,}; {a.ended}"
        length = 100 * (a.last - a.first) / whole
        bars.append(Bar(100 * a.first / whole, length, a.ranks, text))
    saved = run.of("checkpoint")
    marks = [
        Mark("checkpoint", 100 * r["step"] / whole, f"checkpoint, step {r['step']:,}")
        for r in saved[:: -max(1, -(-len(saved) // _MOST_MARKS))]
    ]
    marks += [
        Mark("resume", 100 * a.first / whole, f"resumed from {a.resumed_from} on {a.ranks}")
        for a in attempts
        if a.resumed_from
    ]
    summary = f"{count(last, 'step')}, {count(len(saved), 'checkpoint')}, "
    if len(attempts) == 1:
        summary += f"in one start on {attempts[0].ranks}."
    else:
        groups = itertools.groupby(a.ranks for a in attempts)
        ranks = [(on, len([*same])) for on, same in groups]
        starts = ", then ".join(f"{on} ({count(n, 'start')})" for on, n in ranks[:8])
        more = " …" if len(ranks) > 8 else ""
        restarts = count(len(attempts) - 1, "restart")
        on_same = f"{restarts}, all on {ranks[0][0]}."
        summary += on_same if len(ranks) == 1 else f"{restarts}: on {starts}{more}."
    head = ("attempt", "began", "ranks", "device", "launcher", "from", "steps kept", "end")
    rows = [(str(place), *a.row()) for place, a in enumerate(attempts, start=1)]
    best = run.best_evaluation.get("step")
    files = [
        (
            r["path"].removeprefix("checkpoints/") + (", best" if r["step"] == best else ""),
            f"{r['step']:,}",
            number(r.get("seconds")),
            str(r.get("sha256") or "–")[:12],
        )
        for r in saved
    ]
    columns = ("file", "step", "seconds to save", "SHA-256")
    title = "Checkpoints as they were saved"
    return TimeLine(
        summary=summary,
        bars=bars,
        marks=marks,
        last_step=last,
        attempts=_last_rows("Attempts", head, rows),
        checkpoints=_last_rows(title, columns, files) if files else None,
    )


def _last_rows(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    more = len(rows) > _MOST_ATTEMPTS
    note = f"The last {_MOST_ATTEMPTS} of {len(rows):,}." if more else ""
    return Table(title=title, columns=columns, rows=rows[-_MOST_ATTEMPTS:], note=note)


def _attempts(run: RunData) -> list[_Attempt]:
    attempts: list[_Attempt] = []
    before: Record = {}
    for record in run.records:
        event = record["event"]
        if event == "start":
            if attempts:
                attempts[-1].close(before, "killed, or lost")
            last = attempts[-1].last if attempts else 0
            attempts.append(_Attempt(start=record, first=last, last=last))
        elif attempts and event == "resume":
            attempts[-1].first = attempts[-1].last = record["step"]
            attempts[-1].resumed_from = str(record["checkpoint"])
            attempts[-1].changes = ", ".join(texts(record.get("changes")))
        elif attempts and event == "stop":
            attempts[-1].ended = str(record.get("reason", "stopped"))
        if isinstance(record.get("step"), int):
            before = record
    if attempts:
        attempts[-1].close(before, run.status)
    return attempts


_MOST_CLASSES = 50
"""More classes than these are too many for a table of all, and for a square of all by all."""
_WITH_NUMBERS = 20
_LEVELS = 10


class HeatMap(NamedTuple):
    """The confusion matrix: (count, level of its colour, 0 to 10), by target and prediction."""

    names: list[str]
    rows: list[list[tuple[int, int]]]
    with_numbers: bool


@dataclass(frozen=True, kw_only=True)
class ByClass:
    """Accuracy of each class, and the confusion matrix where it can be shown."""

    split: str
    summary: str
    table: Table
    heat: HeatMap | None


def by_class(run: RunData) -> ByClass | None:
    """Return the latest evaluation's figures by class, the test's before the validation's."""
    test = run.result.get("test")
    evaluations = [("test", test)] if isinstance(test, dict) else []
    for split in ("test", "validation"):
        evaluations += [(split, record) for record in run.of("evaluation", split)[::-1]]
    for split, record in evaluations:
        per_class = record.get("per_class")
        if isinstance(per_class, dict) and per_class:
            accuracies = {
                name: value if isinstance(value, int | float) and 0 <= value <= 1 else None
                for name, value in per_class.items()
            }
            return _by_class(split, accuracies, confusion_of(record))
    return None


def _by_class(
    split: str, accuracies: Mapping[str, float | None], confusion: list[list[int]] | None
) -> ByClass:
    names = list(accuracies)
    rated = [name for name in names if accuracies[name] is not None]
    worst = sorted(rated, key=lambda name: accuracies[name] or 0.0)
    shown = worst if len(names) > _MOST_CLASSES else [*worst, *(n for n in names if n not in rated)]
    place = {name: at for at, name in enumerate(names)}
    rows = []
    for name in shown[:_MOST_CLASSES]:
        row = confusion[place[name]] if confusion else []
        others = [(cell, at) for at, cell in enumerate(row) if cell and at != place[name]]
        taken = ", ".join(f"{names[at]} ({cell:,})" for cell, at in sorted(others)[:-4:-1])
        samples = number(sum(row)) if row else "–"
        rows.append((name, _accuracy(accuracies[name]), samples, taken or "–"))
    summary, note, heat = f"{len(names):,} classes, none of which has samples.", "", None
    if worst:
        ends = " to ".join(f"{_accuracy(accuracies[n])} ({n})" for n in (worst[0], worst[-1]))
        summary = f"{len(names):,} classes: from {ends}."
    if len(names) > _MOST_CLASSES:
        note = (
            f"The {len(rows)} of {len(names):,} classes with the lowest accuracy. A confusion "
            "matrix of all classes would be too large to show."
        )
    elif confusion:
        # By the row: a rare class is as visible as a common one.
        cells = [[(cell, -(-_LEVELS * cell // (sum(r) or 1))) for cell in r] for r in confusion]
        heat = HeatMap(names, cells, len(names) <= _WITH_NUMBERS)
    return ByClass(
        split=split,
        summary=summary,
        table=Table(
            title=f"Accuracy by class on the {split} set, the lowest first",
            columns=("class", "accuracy", "samples", "taken for"),
            rows=rows,
            note=note,
        ),
        heat=heat,
    )


def _accuracy(value: float | None) -> str:
    """Return an accuracy as a table has it: 98.0 % and 98.4 % are not the same."""
    return "no samples" if value is None else f"{100 * value:.1f}\N{NO-BREAK SPACE}%"
