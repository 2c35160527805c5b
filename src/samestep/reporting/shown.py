"""What a page shows, as plain values: tables, charts, and numbers in words."""

import math
import sys
from dataclasses import dataclass
from typing import Any, Literal

from samestep.reporting.series import Curve


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table; the first column names its rows."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    marked: frozenset[int] = frozenset()
    """Rows that stand out."""
    note: str = ""


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
            caption=f"{self.title}{unit}, by {self.x}",
            head=("", "first", "lowest", "highest", "last"),
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


def number(value: object) -> str:
    """Return a number as a table shows it; what is not finite is said."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "–" if value is None else str(value)
    if abs(value) > sys.float_info.max or value != value:  # noqa: PLR0124 - NaN
        return "not finite"
    if isinstance(value, int) or (value.is_integer() and 10 <= abs(value) < 1e15):
        return f"{int(value):,}"
    if value and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.3g}"
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"


def percent(share: float) -> str:
    """Return a share in per cent, with a digit more where it is small."""
    if 0 < share < 0.0005:
        return "< 0.1\N{NO-BREAK SPACE}%"
    shown = f"{100 * share:.1f}" if 0 < share < 0.1 else f"{100 * share:.0f}"
    return f"{shown}\N{NO-BREAK SPACE}%"


def texts(found: object) -> list[str]:
    """Return what a record has as a list of sentences; none if it is no list."""
    return [str(text) for text in found] if isinstance(found, list) else []
