"""A sweep's settings and what they do: the best metric of each run, against each setting."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from samestep.base.run.directory import SWEEP
from samestep.base.run.files import read_object
from samestep.base.table import number
from samestep.show.reporting.comparison import Comparison
from samestep.show.reporting.scaling import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH

_LOG_FROM = 8.0
"""The largest value over the least from which an axis is logarithmic."""
_LEAST_APART = 34.0
"""Between two labels of the x axis."""


class Dot(NamedTuple):
    """One run in the drawing."""

    x: float
    y: float
    label: str


@dataclass(frozen=True, kw_only=True)
class SettingChart:
    """The runs' best metric against one setting."""

    id: str
    setting: str
    metric: str
    text: str
    dots: list[Dot]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]


def sweep_charts(found: Comparison) -> list[SettingChart]:
    """Return a chart for each setting that varies; none if the runs are not of one sweep."""
    if len({run.path.resolve().parent for run in found.runs}) > 1:
        return []
    points = [settings_in_sweep(run.path) for run in found.runs]
    best = max if not found.smaller else min
    values = [best((p.value for p in curve), default=None) for curve in found.curves]
    rows = [
        (name, point, value)
        for name, point, value in zip(found.names, points, values, strict=True)
        if value is not None and math.isfinite(value)
    ]
    if len(rows) < 2 or not all(points):
        return []
    varies = (flag for flag in points[0] if len({point[flag] for point in points}) > 1)
    return [_chart(flag, found, rows) for flag in varies]


def settings_in_sweep(run: Path) -> dict[str, str]:
    """Return what a run of a sweep has of its own, flag by flag; nothing for any other run."""
    points = read_object(run.resolve().parent / SWEEP).get("points")
    point = points.get(run.resolve().name) if isinstance(points, dict) else None
    return {str(k): str(v) for k, v in point.items()} if isinstance(point, dict) else {}


def _chart(
    flag: str, found: Comparison, rows: Sequence[tuple[str, dict[str, str], float]]
) -> SettingChart:
    texts = list(dict.fromkeys(point[flag] for _, point, _ in rows))
    places = _places(texts)
    low, high = min(value for *_, value in rows), max(value for *_, value in rows)
    span = high - low or abs(high) or 1.0

    def y(value: float) -> float:
        share = (value - low) / span if high > low else 0.5
        return round(HEIGHT - BOTTOM - 8 - (HEIGHT - TOP - BOTTOM - 16) * share, 2)

    name, point, value = (min if found.smaller else max)(rows, key=lambda row: row[2])
    dots = [
        Dot(
            places[point[flag]],
            y(value),
            f"{name}: {found.metric} {number(value)} with "
            + ", ".join(f"{key} {text}" for key, text in point.items()),
        )
        for name, point, value in rows
    ]
    ticks = sorted((places[text], text) for text in texts)
    apart = all(b[0] - a[0] >= _LEAST_APART for a, b in pairwise(ticks))
    return SettingChart(
        id=f"sweep-{flag}",
        setting=flag,
        metric=found.metric,
        text=f"The best of {len(rows)} runs is {name}: {found.metric} {number(value)} with "
        f"{flag} {point[flag]}.",
        dots=dots,
        x_ticks=ticks if apart else [ticks[0], ticks[-1]],
        y_ticks=[(y(value), f"{value:.3g}") for value in dict.fromkeys((low, high))],
    )


def _places(texts: Sequence[str]) -> dict[str, float]:
    """Return where on the x axis each value is: by its number or its logarithm, else in order."""
    try:
        numbers = [float(text) for text in texts]
    except ValueError:
        numbers = [float(place) for place in range(len(texts))]
    if not all(map(math.isfinite, numbers)):
        numbers = [float(place) for place in range(len(texts))]
    if min(numbers) > 0 and max(numbers) / min(numbers) >= _LOG_FROM:
        numbers = [math.log(value) for value in numbers]
    low, high = min(numbers), max(numbers)
    width = WIDTH - LEFT - RIGHT - 48
    return {
        text: round(LEFT + 24 + width * (value - low) / ((high - low) or 1.0), 2)
        for text, value in zip(texts, numbers, strict=True)
    }
