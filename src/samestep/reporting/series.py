"""Curves for a chart: a million values become at most two thousand, and no peak is lost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from samestep.reporting.table import Table, number

MOST_POINTS = 2000
"""Points of a curve: more than a chart has pixels."""
Role = Literal["steps", "mean", "validation", "test", "part"]
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line of a chart."""

    label: str
    role: Role
    """How it is drawn: single steps thin, means and validations thick."""
    run: int
    """Which of the page's runs it is of."""
    x: tuple[float, ...]
    y: tuple[float | None, ...]
    """None is a gap: the value was NaN, infinite, or not recorded."""
    gaps: int
    """How many of all recorded values those are."""
    summary: tuple[float, float, float, float]
    """The first value, the least, the greatest and the last, of all that are finite."""


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
    whole = values[finite]
    kept = thin(places, values, most)
    return Curve(
        label=label,
        role=role,
        run=run,
        x=tuple(short_float(value) for value in places[kept].tolist()),
        y=tuple(
            short_float(v) if ok else None
            for v, ok in zip(values[kept].tolist(), finite[kept], strict=True)
        ),
        gaps=int(len(values) - finite.sum()),
        summary=(float(whole[0]), float(whole.min()), float(whole.max()), float(whole[-1])),
    )


def thin(x: Floats, y: Floats, most: int = MOST_POINTS) -> NDArray[np.intp]:
    """Return which values to draw: of every stretch of x the least, the greatest and one gap.

    A stretch is about a pixel wide, so the drawing looks as that of all values would. The first and
    the last value stay.
    """
    if len(x) <= most:
        return np.arange(len(x))
    edges = np.linspace(x[0], x[-1], most // 2)
    starts = np.append(np.searchsorted(x, edges[:-1]), len(x))
    finite = np.isfinite(y)
    kept = {0, len(x) - 1}
    for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        there = finite[begin:end]
        if not there.any():
            kept.update((begin,) if end > begin else ())
            continue
        part = y[begin:end]
        kept.add(begin + int(np.argmin(np.where(there, part, np.inf))))
        kept.add(begin + int(np.argmax(np.where(there, part, -np.inf))))
        if not there.all():
            kept.add(begin + int(np.argmin(there)))
    return np.array(sorted(kept))


def grouped_means(rows: Floats, most: int = MOST_POINTS // 2) -> tuple[Floats, NDArray[np.intp]]:
    """Return the means of neighbouring rows, at most so many, and each group's last row.

    Areas on top of each other have to be thinned together, else they would not add up.
    """
    if len(rows) <= most:
        return rows, np.arange(len(rows))
    starts = np.linspace(0, len(rows), most, endpoint=False).astype(int)
    sizes = np.diff(np.append(starts, len(rows)))
    means = np.add.reduceat(rows, starts, axis=0) / sizes[:, None]
    return means, np.append(starts[1:], len(rows)) - 1


def short_float(value: float) -> float:
    """Return a number with the six digits that a chart can show; whole numbers stay whole."""
    return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.6g}")


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart that the page draws from its data, with its numbers as a table beside it."""

    id: str
    title: str
    x: str
    """What the x axis counts."""
    y: str
    """Unit of the values; empty if they have none."""
    curves: tuple[Curve, ...]
    kind: Literal["lines", "stack"] = "lines"
    text: str = ""
    """What it says, in words."""

    @property
    def gaps(self) -> int:
        """How many values are not drawn, because they are no finite numbers."""
        return sum(curve.gaps for curve in self.curves)

    @property
    def numbers(self) -> Table:
        """The chart as a table of a row per curve."""
        rows = tuple((c.label, *(number(value) for value in c.summary)) for c in self.curves)
        unit = f" ({self.y})" if self.y else ""
        return Table(
            title=f"{self.title}{unit}, by {self.x}",
            columns=("", "first", "lowest", "highest", "last"),
            rows=rows,
        )

    @property
    def label(self) -> str:
        """What a screen reader says in place of the drawing."""
        said = [
            f"{c.label} from {number(c.summary[0])} to {number(c.summary[3])}"
            for c in self.curves[:6]
        ]
        kind = "Stacked areas" if self.kind == "stack" else "Line chart"
        return f"{kind} of {self.title} by {self.x}: {'; '.join(said)}."

    def as_json(self) -> dict[str, Any]:
        """Return what the page's script draws."""
        names = ("label", "role", "run", "x", "y")
        return {
            **{name: getattr(self, name) for name in ("id", "title", "kind", "x", "y")},
            "curves": [{name: _finite(getattr(c, name)) for name in names} for c in self.curves],
        }


def _finite(values: Any) -> Any:
    """Return a list with nothing in place of what JSON cannot hold."""
    if not isinstance(values, list | tuple):
        return values
    return [v if not isinstance(v, float) or math.isfinite(v) else None for v in values]
