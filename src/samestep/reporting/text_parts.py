"""Several runs side by side as tables, and sentences of what the records tell."""

from collections.abc import Sequence

from samestep.reporting.comparison import UNSET, Comparison
from samestep.reporting.comparison_text import metric_name, same_training_lines
from samestep.reporting.shown import Table, number
from samestep.reporting.words import short
from samestep.run.records import Record

_LONGEST = 60


def memory(system: Sequence[Record]) -> str:
    """Return how much memory was used, or how to have it recorded."""
    names = {
        "process_memory_gib": "The training process of rank 0",
        "memory_used_gib": "The machine",
    }
    said = []
    for name, who in names.items():
        used = [r[name] for r in system if isinstance(r.get(name), int | float)]
        if used:
            said.append(f"{who} used up to {number(max(used))} GiB.")
    return " ".join(said)


def tables(found: Comparison) -> tuple[Table, ...]:
    """Return how the runs differ in numbers: speed, phases, time to the metric."""
    made = [_speed(found), _phases(found), _target(found)]
    return tuple(table for table in made if table is not None)


def overview(found: Comparison) -> Table:
    """Return the runs with their names, as a table."""
    best = [
        (min if found.smaller else max)((p.value for p in curve), default=None)
        for curve in found.curves
    ]
    rows = tuple(
        (
            name,
            str(run.path),
            run.recipe or "unknown",
            run.status,
            number(run.plan.get("world_size")),
            number(value),
        )
        for name, run, value in zip(found.names, found.runs, best, strict=True)
    )
    head = ("run", "directory", "recipe", "status", "ranks", f"best {metric_name(found)}")
    return Table(caption="Runs", head=head, rows=rows)


def settings(found: Comparison) -> Table | None:
    """Return the settings and facts that differ; of several recipes, those that all have."""
    differ = found.differences
    if _recipes(found) > 1:
        differ = [one for one in differ if UNSET not in one.values]
    if not differ:
        return None
    marked = frozenset(place for place, one in enumerate(differ) if one.decides)
    notes = ["Marked rows make it another training."] if marked else []
    if left := len(found.differences) - len(differ):
        notes.append(f"{left} more are not of all recipes.")
    return Table(
        caption="Settings and facts that differ",
        head=("", *found.names),
        rows=tuple((one.name, *map(_cut, one.values)) for one in differ),
        marked=marked,
        note=" ".join(notes),
    )


def _recipes(found: Comparison) -> int:
    return len({run.recipe for run in found.runs if run.recipe})


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _speed(found: Comparison) -> Table | None:
    speeds = found.throughput
    if not any(speeds):
        return None
    first = next(speed.samples_per_s for speed in speeds if speed)
    shown = {
        "samples/s": [s and short(s.samples_per_s) for s in speeds],
        "against the first": [s and f"{s.samples_per_s / first:.2f} ×" for s in speeds],
        "ms per step": [s and number(s.ms_per_step) for s in speeds],
        "measured over": [s and s.basis for s in speeds],
    }
    rows = tuple((name, *(value or "–" for value in values)) for name, values in shown.items())
    return Table(caption="Throughput", head=("", *found.names), rows=rows)


def _phases(found: Comparison) -> Table | None:
    names = dict.fromkeys(name for one in found.phases for name in one or ())
    if not names:
        return None
    rows = tuple((n, *(number((one or {}).get(n)) for one in found.phases)) for n in names)
    return Table(caption="Milliseconds of a step on rank 0", head=("", *found.names), rows=rows)


def _target(found: Comparison) -> Table | None:
    if found.target is None or _recipes(found) > 1:
        return None
    sign, goals = "≤" if found.smaller else "≥", found.reached
    shown = {
        "step": [g and number(g.step) for g in goals],
        "samples": [g and f"{g.samples:,.0f}" for g in goals],
        "seconds of training": [g and number(g.seconds) for g in goals],
        "with pauses, seconds": [g and number(g.with_pauses) for g in goals],
    }
    rows = tuple((k, *(v or "not reached" for v in values)) for k, values in shown.items())
    caption = f"Time to {metric_name(found)} {sign} {found.target:g}"
    return Table(caption=caption, head=("", *found.names), rows=rows)


def verdicts(found: Comparison) -> tuple[str, ...]:
    """Return whether each run is the same training as the first; of one recipe alone."""
    if _recipes(found) < 2:
        return tuple(same_training_lines(found))
    told = (
        "Losses and metrics of different recipes measure different things, so each recipe has "
        "charts of its own below. A sample is other work in each, so speeds are not comparable "
        "either."
    )
    if found.target is not None:
        told += f" For the same reason the time to {found.target:g} is not told."
    return (told,)
