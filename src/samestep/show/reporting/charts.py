"""Charts of runs: a million values become at most two thousand, and no peak is lost."""

import itertools
import math
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from samestep.base.run.records import IN_ORDER, Record, metric_values
from samestep.base.table import Table
from samestep.base.words import number
from samestep.show.reporting.curves import epochs_of
from samestep.show.reporting.run_data import RunData

MOST_POINTS = 2000  # points of a curve: more than a chart has pixels
_FEWEST = 400  # points of a curve, however many runs there are
MOST_CHARTS = 60
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
_MOST_OWN = MOST_CHARTS - len(_MEASURED) - 2
Role = Literal["steps", "mean", "validation", "best", "test", "part"]
"""How a curve is drawn: single steps thin, means and validations thick, the best as a point."""
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line of a chart."""

    label: str
    role: Role
    run: int  # which of the page's runs it is of
    x: tuple[float, ...]
    y: tuple[float | None, ...]  # None is a gap: the value was NaN, infinite, or not recorded
    gaps: int  # how many of all recorded values those are
    summary: tuple[float, float, float, float]
    """The first value, the least, the greatest and the last, of all that are finite."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart that the page draws from its data, with its numbers as a table."""

    id: str
    title: str
    x: str  # what the x axis counts
    y: str  # unit of the values; empty if they have none
    curves: list[Curve]
    kind: Literal["lines", "stack"] = "lines"

    @property
    def gaps(self) -> int:
        """How many values are not drawn, because they are not finite numbers."""
        return sum(curve.gaps for curve in self.curves)

    @property
    def numbers(self) -> Table:
        """The chart as a table of a row per curve."""
        unit = f" ({self.y})" if self.y else ""
        return Table(
            title=f"{self.title}{unit}, by {self.x}",
            columns=("", "first", "lowest", "highest", "last"),
            rows=[(c.label, *map(number, c.summary)) for c in self.curves],
        )

    @property
    def label(self) -> str:
        """What a screen reader says in place of the drawing."""
        ranges = "; ".join(
            f"{c.label} from {number(c.summary[0])} to {number(c.summary[3])}"
            for c in self.curves[:6]
        )
        kind = "Stacked areas" if self.kind == "stack" else "Line chart"
        return f"{kind} of {self.title} by {self.x}: {ranges}."

    def as_json(self) -> dict[str, Any]:
        """Return the data that the page's script draws; values that JSON cannot hold are null."""

        def finite(values: Any) -> Any:
            if not isinstance(values, tuple):
                return values
            return [v if not isinstance(v, float) or math.isfinite(v) else None for v in values]

        names = ("label", "role", "run", "x", "y")
        return {
            **{name: getattr(self, name) for name in ("id", "title", "kind", "x", "y")},
            "curves": [{name: finite(getattr(c, name)) for name in names} for c in self.curves],
        }


def make_curve(
    label: str,
    role: Role,
    run: int,
    x: Sequence[float] | Floats,
    y: Sequence[object] | Floats,
    most: int = MOST_POINTS,
) -> Curve | None:
    """Return a curve of recorded values, None where not one of them is a finite number."""
    places = np.asarray(x, dtype=float)
    values = np.asarray(y, dtype=float)  # None becomes NaN
    if len(places) > 1 and np.any(np.diff(places) < 0):
        order = np.argsort(places, kind="stable")
        places, values = places[order], values[order]
    finite = np.isfinite(values)
    if not finite.any():
        return None
    finite_values = values[finite]
    indices = _thin(places, values, most)
    return Curve(
        label=label,
        role=role,
        run=run,
        x=tuple(map(_short_float, places[indices].tolist())),
        y=tuple(
            _short_float(v) if ok else None
            for v, ok in zip(values[indices].tolist(), finite[indices], strict=True)
        ),
        gaps=int(len(values) - finite.sum()),
        summary=(
            float(finite_values[0]),
            float(finite_values.min()),
            float(finite_values.max()),
            float(finite_values[-1]),
        ),
    )


def _thin(x: Floats, y: Floats, most: int) -> NDArray[np.intp]:
    """Return the indices to draw: of every stretch of x the least, the greatest and one gap.

    A stretch is about a pixel wide, so the drawing looks the same. The first and last value stay.
    """
    if len(x) <= most:
        return np.arange(len(x))
    edges = np.linspace(x[0], x[-1], most // 2)
    starts = np.append(np.searchsorted(x, edges[:-1]), len(x))
    finite = np.isfinite(y)
    indices = {0, len(x) - 1}
    for begin, end in itertools.pairwise(starts.tolist()):
        there = finite[begin:end]
        if not there.any():
            indices.update((begin,) if end > begin else ())
            continue
        part = y[begin:end]
        indices.add(begin + int(np.argmin(np.where(there, part, np.inf))))
        indices.add(begin + int(np.argmax(np.where(there, part, -np.inf))))
        if not there.all():
            indices.add(begin + int(np.argmin(there)))
    return np.array(sorted(indices))


def grouped_means(rows: Floats, most: int = MOST_POINTS // 2) -> tuple[Floats, NDArray[np.intp]]:
    """Return the means of neighbouring rows, at most `most`, and each group's last row.

    Areas on top of each other have to be thinned together, else they would not add up.
    """
    if len(rows) <= most:
        return rows, np.arange(len(rows))
    starts = np.linspace(0, len(rows), most, endpoint=False).astype(int)
    sizes = np.diff(np.append(starts, len(rows)))
    means = np.add.reduceat(rows, starts, axis=0) / sizes[:, None]
    return means, np.append(starts[1:], len(rows)) - 1


def _short_float(value: float) -> float:
    """Return a number with the six digits that a chart can show; whole numbers stay whole."""
    return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.6g}")


class Lines:
    """The recorded values of one run, by the name of their chart; read once from its records."""

    def __init__(self, run: RunData) -> None:
        self.run = run
        self.curves: dict[str, list[tuple[Role, str, Floats, Floats]]] = {}
        """Chart → (role, label, steps, values) of each of its curves."""
        rows = run.steps
        steps, samples = (_numbers(rows.numbers(name) or ()) for name in ("step", "samples"))
        self._samples = steps, samples
        for name in ("loss", *sorted(rows.names - _OF_A_STEP)):
            self._add_curve(name, "steps", "training, steps", steps, rows.numbers(name))
        for name, _, _ in _MEASURED:
            self._add_curve(f"_{name}", "steps", "steps", steps, rows.numbers(name))
        logged = [r for r in run.of("metrics") if isinstance(r.get("step"), int)]
        self._add_each("steps", "logged", logged, "values")
        epochs = run.of("epoch")
        self._add("loss", "mean", "training, epochs", epochs)
        self._add_each("mean", "training, epochs", epochs, "metrics")
        splits: tuple[Role, ...] = ("validation", "test")
        for split in splits:
            records = run.of("evaluation", split)
            if split == "test":  # at the end of a run, and of the weights of an earlier step
                saved = {r["path"].rpartition("/")[2]: r["step"] for r in run.of("checkpoint")}
                records = [
                    {**r, "step": saved.get(r.get("checkpoint"), r["step"])} for r in records
                ]
            for name in dict.fromkeys(n for r in records for n in metric_values(r)):
                self._add(name, split, split, records)
        if best := run.best_evaluation:
            self._add(run.best["metric"], "best", f"best, epoch {best.get('epoch')}", [best])
        for name, label in _MEMORY.items():
            self._add(name, "part", label, run.system, chart="_memory")

    def _add(
        self,
        name: str,
        role: Role,
        label: str,
        records: Sequence[Record],
        tables: Sequence[Record] | None = None,
        chart: str = "",
    ) -> None:
        values = [table.get(name) for table in (records if tables is None else tables)]
        if {*map(type, values)} <= {int, float, type(None)}:
            steps = _numbers([record.get("step", 0) for record in records])
            self._add_curve(chart or name, role, label, steps, values)

    def _add_curve(
        self, chart: str, role: Role, label: str, at: Floats, values: Sequence[object] | None
    ) -> None:
        if values:
            self.curves.setdefault(chart, []).append((role, label, at, _numbers(values)))

    def _add_each(self, role: Role, label: str, records: Sequence[Record], inside: str) -> None:
        """Add what the records have in a table of their own, a chart for each of its names."""
        tables = [r[inside] if isinstance(r.get(inside), dict) else {} for r in records]
        for name in dict.fromkeys(name for table in tables for name in table):
            self._add(name, role, label, records, tables)

    @property
    def own(self) -> list[str]:
        """The charts of values that are not in every run."""
        return [key for key in self.curves if key != "loss" and not key.startswith("_")]

    def places(self, at: Floats, by: str) -> Floats:
        """Return the x of some steps: the step itself, or the samples until then."""
        plan = self.run.plan
        if by == "step":
            return at
        unknown = not plan or None in (plan["num_samples"], plan["steps_per_epoch"])
        if unknown or plan.get("batch_tokens"):  # batches differ
            marks, samples = (np.append(0.0, values) for values in self._samples)
            return _numbers(np.interp(at, marks, samples))
        per_epoch, batch = plan["steps_per_epoch"], plan["global_batch_size"]
        epochs, rest = np.divmod(at, per_epoch)
        return _numbers(epochs * min(plan["num_samples"], per_epoch * batch) + rest * batch)


def _numbers(values: Sequence[object] | Floats) -> Floats:
    try:
        return np.asarray(values, dtype=float)  # None becomes NaN
    except OverflowError:  # an integer of hundreds of digits: no training has written it
        huge = sys.float_info.max
        finite = [None if isinstance(v, int) and abs(v) > huge else v for v in values]
        return np.asarray(finite, dtype=float)


def charts_of(
    lines: Sequence[Lines], names: Sequence[str], places: Sequence[int], suffix: str = ""
) -> tuple[list[Chart], int]:
    """Return a chart for each value that any of the runs recorded, and how many have none.

    Args:
        lines: the values of each run.
        names: what each is called in the legends; empty for a single run.
        places: which of the page's runs each is, for its colour.
        suffix: what makes the charts' ids different from those of other recipes.
    """
    # So that the page of many runs stays as small as that of one, and its charts as fast.
    most = max(_FEWEST, MOST_POINTS // len(lines))
    by = "step" if len(lines) == 1 else "samples trained"
    own = list(dict.fromkeys(key for run in lines for key in run.own))
    series = [
        ("loss", "Loss", ""),
        *((key, key.replace("_", " "), "") for key in own[:_MOST_OWN]),
        *((f"_{key}", title, unit) for key, title, unit in _MEASURED),
        ("_memory", "Memory", "GiB"),
    ]
    charts: list[Chart] = []
    for key, title, unit in series:
        drawn = [
            make_curve(f"{name} {label}" if name else label, role, place, at, values, most)
            for run, name, place in zip(lines, names, places, strict=True)
            for role, label, steps, values in run.curves.get(key, [])
            if not (name and role in ("best", "test"))  # points that the tables have
            for at in [run.places(steps, by)]
        ]
        if curves := [curve for curve in drawn if curve]:
            shown = title[:1].upper() + title[1:]
            ident = _ident(key, suffix, {"phases", *(chart.id for chart in charts)})
            charts.append(Chart(id=ident, title=shown, x=by, y=unit, curves=curves))
    return charts, max(0, len(own) - _MOST_OWN)


def _ident(key: str, suffix: str, taken: Collection[str]) -> str:
    """Return a name that may be an element's, of a metric that may be called anything."""
    plain = re.sub(r"[^\w.-]+", "-", key).strip("-_") or "chart"
    names = (f"{plain}{f'.{n}' if n else ''}{suffix}" for n in itertools.count())
    return next(name for name in names if name not in taken)


def phases_chart(run: RunData, place: int, suffix: str = "") -> Chart | None:
    """Return the milliseconds of a step in each phase, epoch by epoch, or None if not recorded."""
    epochs = [r for r in epochs_of(run) if isinstance(r.get("phases"), dict)]
    names = [name for name in IN_ORDER if any(r["phases"].get(name) for r in epochs)]
    if not names:
        return None
    rows = [[1000 * r["phases"].get(n, 0.0) / r["num_steps"] for n in names] for r in epochs]
    marks = [0.0, *(float(record["step"]) for record in epochs)]
    means, last = grouped_means(np.array(rows))
    x = (0.0, *(_short_float(marks[at + 1]) for at in last.tolist()))
    curves = []
    for name, column in zip(names, means.T.tolist(), strict=True):
        # An epoch's value holds from where it begins to where it ends.
        y = tuple(map(_short_float, (*column, column[-1])))
        summary = (column[0], min(column), max(column), column[-1])
        curves.append(Curve(label=name, role="part", run=place, x=x, y=y, gaps=0, summary=summary))
    title = "Phases of a step on rank 0"
    return Chart(id=f"phases{suffix}", title=title, x="step", y="ms", curves=curves, kind="stack")
