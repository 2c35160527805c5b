"""Curves of some runs at common points: by samples trained, and by seconds of training."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from samestep.base.run.records import IN_ORDER, Record
from samestep.show.reporting.run_data import TRAIN_LOSS, RunData

ROWS = 6


class Point(NamedTuple):
    """One value of a curve, and where in the training it was measured."""

    step: int
    samples: float  # samples trained until then, over all ranks
    seconds: float
    """Seconds of training steps until then; evaluations, checkpoints and compiling left out."""
    value: float


@dataclass(frozen=True, kw_only=True)
class Aligned:
    """The values of some curves at the same places."""

    places: tuple[float, ...]
    values: tuple[tuple[float | None, ...], ...]
    """One row a place, one value a run; None where a run has none."""
    as_recorded: bool
    """Whether every run recorded a value at every place; else some lie between two records."""


def curves_of(runs: Sequence[RunData], metric: str) -> list[list[Point]]:
    """Return each run's curve of a metric, empty where it has none.

    The training loss is the mean over each epoch if all runs have two or more, else that of steps.
    """
    event, name = "evaluation", metric
    if metric == TRAIN_LOSS:
        event, name = "epoch" if has_epochs(runs) else "step", "loss"
    curves = []
    for run in runs:
        clock = _seconds_of_steps(run)
        curves.append(
            [
                Point(
                    r["step"], samples_at(run, r["step"]), between(clock, r["step"]), float(r[name])
                )
                for r in run.of(event)
                if r.get("split", "validation") == "validation"
                and isinstance(r.get(name), int | float)
            ]
        )
    return curves


def has_epochs(runs: Sequence[RunData]) -> bool:
    """Whether all runs have two epochs or more, so that a mean over each makes a curve."""
    return all(len(run.of("epoch")) > 1 for run in runs)


def samples_at(run: RunData, step: int) -> float:
    """Return the samples trained by this step; the last batch of an epoch may be smaller."""
    plan = run.plan
    if not plan or plan["num_samples"] is None or plan.get("batch_tokens"):  # batches differ
        marks = {0.0: 0.0, **{float(r["step"]): float(r["samples"]) for r in run.of("step")}}
        return between(sorted(marks.items()), step)
    epochs, rest = divmod(step, plan["steps_per_epoch"])
    epoch = min(plan["num_samples"], plan["steps_per_epoch"] * plan["global_batch_size"])
    return float(epochs * epoch + rest * plan["global_batch_size"])


def _seconds_of_steps(run: RunData) -> list[tuple[float, float]]:
    """Return the seconds of training after some steps: those of `step` and `epoch` records."""
    marks = {0.0: 0.0}
    marks |= {float(r["step"]): float(r["seconds"]) for r in run.of("step")}
    finished: dict[int, float] = {}
    for record in run.of("epoch"):  # of one that was cut short there may be two records
        finished[record["epoch"]] = float(record["train_seconds"])
        if set(range(1, record["epoch"])) <= finished.keys():
            marks[float(record["step"])] = sum(finished[e] for e in range(1, record["epoch"] + 1))
    return sorted(marks.items())


def between(marks: Sequence[tuple[float, float]], place: float) -> float:
    """Return a value on the line between two marks; beyond the last one, on that line's course."""
    at = bisect_left(marks, (place, -math.inf))
    if at < len(marks) and marks[at][0] == place:
        return marks[at][1]
    if len(marks) == 1:
        return marks[0][1]
    at = min(max(at, 1), len(marks) - 1)
    (x0, y0), (x1, y1) = marks[at - 1], marks[at]
    return y0 + (y1 - y0) * (place - x0) / (x1 - x0)


def by_samples(curves: Sequence[list[Point]]) -> Aligned | None:
    """Return the curves at common numbers of samples, within what all of them cover.

    Places where all runs recorded a value are taken as they are; else places are spread evenly, and
    values interpolated. None if the runs cover nothing together.
    """
    marks = [sorted({point.samples: point.value for point in curve}.items()) for curve in curves]
    there = [of_one for of_one in marks if of_one]
    if not there:
        return None
    common = sorted(set.intersection(*({place for place, _ in of_one} for of_one in there)))
    if len(common) > 1 or len(there) == 1:
        if len(common) > ROWS:  # the first and the last stay
            common = [common[round(n * (len(common) - 1) / (ROWS - 1))] for n in range(ROWS)]
        return _at(marks, common, as_recorded=True)
    low = max(of_one[0][0] for of_one in there)
    high = min(of_one[-1][0] for of_one in there)
    if low > high:
        return None
    places = [low + (high - low) * n / (ROWS - 1) for n in range(ROWS if high > low else 1)]
    return _at(marks, places, as_recorded=False)


def by_seconds(curves: Sequence[list[Point]]) -> Aligned | None:
    """Return the curves at common times, from the first value of any run to the last of any.

    The places are spread by equal factors, since one run may be many times faster than another.
    Values are interpolated, never extrapolated.
    """
    marks = [sorted({point.seconds: point.value for point in curve}.items()) for curve in curves]
    ends = [place for of_one in marks for place, _ in (of_one[:1] + of_one[-1:])]
    if not ends or min(ends) <= 0:
        return None
    low, high = min(ends), max(ends)
    between_them = [low * (high / low) ** (n / (ROWS - 1)) for n in range(1, ROWS - 1)]
    return _at(marks, [low, *between_them, high] if high > low else [low], as_recorded=False)


def _at(
    marks: Sequence[list[tuple[float, float]]], places: list[float], *, as_recorded: bool
) -> Aligned:
    def value(of_one: list[tuple[float, float]], place: float) -> float | None:
        covered = of_one and of_one[0][0] <= place <= of_one[-1][0]
        return between(of_one, place) if covered else None

    rows = {place: tuple(value(of_one, place) for of_one in marks) for place in places}
    # Between the end of one run and the start of another no run has a value.
    rows = {place: row for place, row in rows.items() if any(v is not None for v in row)}
    return Aligned(places=tuple(rows), values=tuple(rows.values()), as_recorded=as_recorded)


_PAUSES = ("evaluation", "checkpoint", "compile")


def _pause_s(record: Record) -> float | None:
    """Return the seconds that training waited; a checkpoint may be written while it continues."""
    seconds: float | None = record.get("blocked_seconds", record.get("seconds"))
    return seconds


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """How fast a run trained, over its epochs but the first, in which everything warms up."""

    samples_per_s: float
    """All samples of these epochs by all their seconds, so that the phases add up to it."""
    lowest: float
    highest: float
    steps_per_s: float
    basis: str  # what it was measured over
    ms_per_step: float
    us_per_sample: float
    flops_per_s: float | None = None  # model FLOPs of all ranks, if they were counted
    mfu: float | None = None  # the part of what the GPUs can do at most, if they are known
    peak_memory_bytes: int | None = None  # the most that a rank held, if it was recorded


@dataclass(frozen=True, kw_only=True)
class Goal:
    """Where a metric first was at its target, as far as evaluations tell."""

    step: int
    samples: float
    seconds: float  # of training steps
    with_pauses: float | None
    """With the evaluations, checkpoints and compiling until then, if the records tell."""


def epochs_of(run: RunData) -> list[Record]:
    """Return the `epoch` records, each with its `num_steps`: the last of each epoch.

    Of an epoch that a run stopped within there is one more, and the last one counts all of it.
    """
    epochs, before = [], 0
    for record in {record["epoch"]: record for record in run.of("epoch")}.values():
        if (steps := record["step"] - before) > 0:
            epochs.append({**record, "num_steps": steps})
            before = record["step"]
    return epochs


def measured_epochs(run: RunData) -> list[Record]:
    """Return the epochs to measure by: all but the first, if it can."""
    epochs = [record for record in epochs_of(run) if record["train_seconds"] > 0]
    return epochs[1:] if len(epochs) > 1 else epochs


def throughput(run: RunData) -> Throughput | None:
    """Return a run's throughput, or None if too little is recorded."""
    epochs, marks = measured_epochs(run), run.of("step")
    most = [r["peak_memory_bytes"] for r in run.of("epoch") if r.get("peak_memory_bytes")]
    if epochs:
        names = ("samples", "num_steps", "train_seconds")
        samples, steps, seconds = (sum(r[name] for r in epochs) for name in names)
        rates = [r["samples"] / r["train_seconds"] for r in epochs]
        first, last = epochs[0]["epoch"], epochs[-1]["epoch"]
        basis = f"epoch {first}" if first == last else f"epochs {first}–{last}"
    elif len(marks) > 1 and marks[-1]["seconds"] > marks[0]["seconds"]:
        names = ("samples", "step", "seconds")
        samples, steps, seconds = (marks[-1][name] - marks[0][name] for name in names)
        rates = [samples / seconds]
        basis = f"steps {marks[0]['step']}–{marks[-1]['step']}"
    else:
        return None
    return Throughput(
        samples_per_s=samples / seconds,
        lowest=min(rates),
        highest=max(rates),
        steps_per_s=steps / seconds,
        basis=basis,
        ms_per_step=1000 / (steps / seconds),
        us_per_sample=1e6 / (samples / seconds),
        flops_per_s=_mean_rate(epochs, "flops_per_s"),
        mfu=_mean_rate(epochs, "mfu"),
        peak_memory_bytes=max(most, default=None),
    )


def _mean_rate(epochs: list[Record], name: str) -> float | None:
    """Return a rate over some epochs, each by its seconds; None unless all of them have it."""
    if not epochs or any(record.get(name) is None for record in epochs):
        return None
    seconds: list[float] = [record["train_seconds"] for record in epochs]
    parts = (record[name] * own for record, own in zip(epochs, seconds, strict=True))
    return float(sum(parts)) / sum(seconds)


def phases(run: RunData) -> dict[str, float] | None:
    """Return the milliseconds of a step in each phase, on rank 0, or None if not recorded."""
    epochs = [r for r in measured_epochs(run) if isinstance(r.get("phases"), dict)]
    if not epochs:
        return None
    steps = sum(r["num_steps"] for r in epochs)
    names = [name for name in IN_ORDER if any(name in r["phases"] for r in epochs)]
    return {name: 1000 * sum(r["phases"].get(name, 0.0) for r in epochs) / steps for name in names}


def pauses(run: RunData) -> dict[str, dict[str, float]]:
    """Return the count and the seconds of evaluations, checkpoints and compiling."""
    by_event = {}
    for event in _PAUSES:
        seconds = [s for r in run.of(event) if (s := _pause_s(r)) is not None]
        if seconds:
            by_event[event] = {"count": len(seconds), "seconds": sum(seconds)}
    return by_event


def reached(run: RunData, curve: list[Point], target: float, *, smaller: bool) -> Goal | None:
    """Return the first recorded point of a curve that reached a target; None if none did."""
    there = (p for p in curve if (p.value <= target if smaller else p.value >= target))
    if (point := next(there, None)) is None:
        return None
    # The checkpoint after an evaluation has its step, but was not needed to know.
    seconds: list[Any] = [
        _pause_s(r)
        for r in run.records
        if (r["event"] in _PAUSES and r.get("step", 0) < point.step)
        or (r["event"] == "evaluation" and r["step"] == point.step and r.get("split") != "test")
    ]
    pauses = None if None in seconds else point.seconds + float(sum(seconds))
    return Goal(step=point.step, samples=point.samples, seconds=point.seconds, with_pauses=pauses)
