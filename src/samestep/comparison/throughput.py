"""What the runs cost: throughput, where a step's time went, time to a metric."""

from dataclasses import dataclass
from typing import Any

from samestep.comparison.curves import Point
from samestep.comparison.run_data import RunData
from samestep.run.phase_names import IN_ORDER
from samestep.run.records import Record

_PAUSES = ("evaluation", "checkpoint", "compile")


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """How fast a run trained, over its epochs but the first, in which everything warms up."""

    samples_per_s: float
    """All samples of these epochs by all their seconds, so that the phases add up to it."""
    lowest: float
    highest: float
    steps_per_s: float
    basis: str
    """What it was measured over."""
    ms_per_step: float
    us_per_sample: float


@dataclass(frozen=True, kw_only=True)
class Goal:
    """Where a metric first was at its target, as far as evaluations tell."""

    step: int
    samples: float
    seconds: float
    """Of training steps."""
    with_pauses: float | None
    """With the evaluations, checkpoints and compiling until then, if the records tell."""


def measured_epochs(run: RunData) -> list[Record]:
    """Return the epochs to measure by, each with its `num_steps`: all but the first, if it can."""
    found, before = [], 0
    for record in run.of("epoch"):
        steps = record["step"] - before
        if steps > 0 and record["train_seconds"] > 0:
            found.append({**record, "num_steps": steps})
            before = record["step"]
    return found[1:] if len(found) > 1 else found


def throughput(run: RunData) -> Throughput | None:
    """Return how fast a run trained, or None if too little is recorded."""
    epochs, marks = measured_epochs(run), run.of("step")
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
    )


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
    found = {}
    for event in _PAUSES:
        seconds = [r["seconds"] for r in run.of(event) if r.get("seconds") is not None]
        if seconds:
            found[event] = {"count": len(seconds), "seconds": sum(seconds)}
    return found


def reached(run: RunData, curve: list[Point], target: float, *, smaller: bool) -> Goal | None:
    """Return where a curve first was at a target, at a recorded value; None if it never was."""
    for point in curve:
        if point.value <= target if smaller else point.value >= target:
            step, samples, seconds, _ = point
            pauses = _with_pauses(run, point)
            return Goal(step=step, samples=samples, seconds=seconds, with_pauses=pauses)
    return None


def _with_pauses(run: RunData, point: Point) -> float | None:
    """Add what lay between the steps, up to and with the evaluation that told."""
    # The checkpoint after an evaluation has its step, but was not needed to know.
    seconds: list[Any] = [
        r.get("seconds")
        for r in run.records
        if (r["event"] in _PAUSES and r.get("step", 0) < point.step)
        or (r["event"] == "evaluation" and r["step"] == point.step and r.get("split") != "test")
    ]
    return None if None in seconds else point.seconds + float(sum(seconds))
