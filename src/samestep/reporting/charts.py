"""The charts of some runs of one recipe: the same axes for all of them."""

import itertools
import re
import sys
from collections.abc import Collection, Sequence

import numpy as np

from samestep.reporting.run_data import RunData
from samestep.reporting.series import (
    MOST_POINTS,
    Chart,
    Curve,
    Floats,
    Role,
    grouped_means,
    make_curve,
    short_float,
)
from samestep.run.records import IN_ORDER, Record, metric_values

MOST_CHARTS = 60
_FEWEST = 400
"""Points of a curve, however many runs there are."""
_OF_A_STEP = {
    *("event", "step", "epoch", "samples", "seconds", "loss", "lr", "grad_norm"),
    *("samples_per_s", "time"),
}
_MEASURED = (
    ("lr", "Learning rate", ""),
    ("grad_norm", "Gradient norm", ""),
    ("samples_per_s", "Throughput", "samples/s"),
)
_MEMORY = {"process_memory_gib": "training process", "memory_used_gib": "whole machine, used"}
_Values = tuple[Floats, Floats]
"""Steps, and the values there."""


class Lines:
    """The recorded values of one run, by the name of their chart; read once from its records."""

    def __init__(self, run: RunData, system: Sequence[Record]) -> None:
        self.run = run
        self.found: dict[str, list[tuple[Role, str, _Values]]] = {}
        steps = run.of("step")
        at = _numbers([r["step"] for r in steps])
        self._samples = at, _numbers([r["samples"] for r in steps])
        logged = [r for r in run.of("metrics") if isinstance(r.get("step"), int)]
        names = sorted({name for name in set().union(*steps) if name not in _OF_A_STEP})
        for name in ("loss", *names):
            self._add(name, "steps", "training, steps", at, [r.get(name) for r in steps])
        for name, _, _ in _MEASURED:
            self._add(f"_{name}", "steps", "steps", at, [r.get(name) for r in steps])
        self._add_each("steps", "logged", logged, "values")
        self._of_epochs()
        self._of_evaluations()
        at = _steps(system)
        for name, label in _MEMORY.items():
            self._add("_memory", "part", label, at, [r.get(name) for r in system])

    def _add(
        self, chart: str, role: Role, label: str, steps: Floats, values: Sequence[object]
    ) -> None:
        if {*map(type, values)} <= {int, float, type(None)} and values:
            self.found.setdefault(chart, []).append((role, label, (steps, _numbers(values))))

    def _add_each(self, role: Role, label: str, records: Sequence[Record], inside: str) -> None:
        """Add what the records have in a table of their own, a chart for each of its names."""
        tables = [r[inside] if isinstance(r.get(inside), dict) else {} for r in records]
        for name in dict.fromkeys(name for table in tables for name in table):
            self._add(name, role, label, _steps(records), [table.get(name) for table in tables])

    def _of_epochs(self) -> None:
        epochs = self.run.of("epoch")
        self._add("loss", "mean", "training, epochs", _steps(epochs), [r["loss"] for r in epochs])
        self._add_each("mean", "training, epochs", epochs, "metrics")

    def _of_evaluations(self) -> None:
        splits: tuple[Role, ...] = ("validation", "test")
        for split in splits:
            found = [r for r in self.run.of("evaluation") if r.get("split") == split]
            for name in dict.fromkeys(n for r in found for n in metric_values(r)):
                self._add(name, split, split, _steps(found), [r.get(name) for r in found])

    def places(self, steps: Sequence[float] | Floats, by: str) -> Floats:
        """Return where on the x axis some steps are: the step itself, or the samples until then."""
        at, plan = np.asarray(steps, dtype=float), self.run.plan
        if by == "step":
            return at
        if not plan or plan["num_samples"] is None or plan["steps_per_epoch"] is None:
            marks, samples = (np.append(0.0, known) for known in self._samples)
            return _numbers(np.interp(at, marks, samples))
        per_epoch, batch = plan["steps_per_epoch"], plan["global_batch_size"]
        whole, rest = np.divmod(at, per_epoch)
        return _numbers(whole * min(plan["num_samples"], per_epoch * batch) + rest * batch)


def _numbers(values: Sequence[object] | Floats) -> Floats:
    try:
        return np.asarray(values, dtype=float)  # None becomes NaN
    except OverflowError:  # an integer of hundreds of digits: no training has written it
        return np.asarray([None if _is_huge(value) else value for value in values], dtype=float)


def _is_huge(value: object) -> bool:
    return isinstance(value, int) and abs(value) > sys.float_info.max


def _steps(records: Sequence[Record]) -> Floats:
    return _numbers([record.get("step", 0) for record in records])


def charts_of(
    lines: Sequence[Lines], names: Sequence[str], places: Sequence[int], suffix: str = ""
) -> list[Chart]:
    """Return the charts of some runs; a chart for everything that any of them recorded.

    Args:
        lines: the values of each run.
        names: what each is called in the legends; empty for a single run.
        places: which of the page's runs each is, for its colour.
        suffix: what makes the charts' ids different from those of other recipes.
    """
    # So that the page of many runs stays as small as that of one, and its charts as fast.
    most = max(_FEWEST, MOST_POINTS // len(lines))
    by = "step" if len(lines) == 1 else "samples trained"
    own = _metrics(lines)[: MOST_CHARTS - len(_MEASURED) - 2]
    told = [
        ("loss", "Loss", ""),
        *((key, key.replace("_", " "), "") for key in own),
        *((f"_{key}", title, unit) for key, title, unit in _MEASURED),
        ("_memory", "Memory", "GiB"),
    ]
    charts: list[Chart] = []
    for key, title, unit in told:
        curves = [
            curve
            for one, name, place in zip(lines, names, places, strict=True)
            for curve in _curves(one, key, name, place, by, most)
        ]
        if curves:
            shown = title[:1].upper() + title[1:]
            ident = _ident(key, suffix, {"phases", *(chart.id for chart in charts)})
            charts.append(Chart(id=ident, title=shown, x=by, y=unit, curves=tuple(curves)))
    return charts


def left_out(lines: Sequence[Lines]) -> int:
    """Return how many values have no chart, since a page of more would be read by nobody."""
    return max(0, len(_metrics(lines)) - (MOST_CHARTS - len(_MEASURED) - 2))


def _ident(key: str, suffix: str, taken: Collection[str]) -> str:
    """Return a name that may be an element's, of a metric that may be called anything."""
    plain = re.sub(r"[^\w.-]+", "-", key).strip("-_") or "chart"
    names = (f"{plain}{f'.{n}' if n else ''}{suffix}" for n in itertools.count())
    return next(name for name in names if name not in taken)


def _metrics(lines: Sequence[Lines]) -> list[str]:
    found = dict.fromkeys(key for one in lines for key in one.found if not key.startswith("_"))
    return [key for key in found if key != "loss"]


def _curves(one: Lines, key: str, name: str, place: int, by: str, most: int) -> list[Curve]:
    found = []
    for role, label, (steps, values) in one.found.get(key, []):
        if name and role == "test":
            continue  # a point that the table of differences has
        shown = f"{name} {label}" if name else label
        curve = make_curve(shown, role, place, one.places(steps, by), values, most)
        found += [curve] if curve else []
    return found


def phases_chart(run: RunData, place: int, suffix: str = "") -> Chart | None:
    """Return the milliseconds of a step in each phase, epoch by epoch, or None if not recorded."""
    marks, rows, before = [0.0], [], 0
    epochs = [r for r in run.of("epoch") if isinstance(r.get("phases"), dict)]
    names = [name for name in IN_ORDER if any(r["phases"].get(name) for r in epochs)]
    for record in epochs:
        steps = record["step"] - before
        if steps > 0:
            rows.append([1000 * record["phases"].get(name, 0.0) / steps for name in names])
            marks.append(float(record["step"]))
            before = record["step"]
    if not rows or not names:
        return None
    means, last = grouped_means(np.array(rows))
    x = (0.0, *(short_float(marks[place + 1]) for place in last.tolist()))
    curves = []
    for name, column in zip(names, means.T.tolist(), strict=True):
        # An epoch's value holds from where it begins to where it ends.
        y = tuple(short_float(value) for value in (*column, column[-1]))
        summary = (column[0], min(column), max(column), column[-1])
        curves.append(Curve(label=name, role="part", run=place, x=x, y=y, gaps=0, summary=summary))
    return Chart(
        id=f"phases{suffix}",
        title="Phases of a step on rank 0",
        x="step",
        y="ms",
        curves=tuple(curves),
        kind="stack",
    )
