"""Drawings of several trainings: speed-up by the number of ranks, the metric by a setting.

A scaling study is a file that `samestep scale --json` has written; a sweep is a folder of runs.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from samestep.base.errors import UserError
from samestep.base.run.directory import SWEEP
from samestep.base.run.files import read_object
from samestep.base.table import Table
from samestep.base.words import count, number, percent
from samestep.show.reporting.comparison import Comparison

LEFT, RIGHT, TOP, BOTTOM = 44.0, 12.0, 12.0, 36.0
WIDTH, HEIGHT = 420.0, 300.0
_NAMES = {"weak": "Weak scaling", "strong": "Strong scaling"}


class SpeedPoint(NamedTuple):
    """One number of ranks in the drawing, with the ends of its interval."""

    x: float
    y: float
    low: float
    high: float
    ranks: int
    label: str


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """One way to scale: a drawing and its numbers."""

    id: str
    title: str
    text: str
    points: list[SpeedPoint]
    ideal: tuple[float, float, float, float]  # the line of the ideal: x and y of both ends
    ticks: list[tuple[float, str]]  # places on the y axis, with their labels
    table: Table
    lost: Table


@dataclass(frozen=True, kw_only=True)
class ScalingStudy:
    """All that a study tells."""

    recipe: str
    parts: list[Scaling]
    warnings: list[str]
    phrase: str


def read_study(path: Path) -> ScalingStudy:
    """Read a file of `samestep scale RECIPE --json`; raise UserError if it is none."""
    try:
        study = json.loads(path.read_bytes())
        parts = [_scaling_in(mode, rows) for mode, rows in study["modes"].items() if len(rows) > 1]
        if not parts:
            raise ValueError("no mode has two numbers of ranks")
        rounds = study["modes"][parts[0].id][0]["rounds"]
        return ScalingStudy(
            recipe=str(study["recipe"]),
            parts=parts,
            warnings=[str(text) for text in study.get("warnings", [])],
            phrase=f"{count(rounds, 'round')}, {number(study.get('seconds'))} s each after warming "
            "up. The bars are 95 % intervals of the speed-up.",
        )
    except (
        *(OSError, ValueError, KeyError, TypeError, AttributeError),
        *(ArithmeticError, RecursionError),
    ) as error:
        raise UserError(
            f"{path} is not a scaling study ({type(error).__name__}: {error}). Write one with: "
            "samestep scale RECIPE --nproc 1,2,4 --json > scaling.json"
        ) from error


def _scaling_in(mode: str, rows: list[dict[str, Any]]) -> Scaling:
    base, last = int(rows[0]["ranks"]), rows[-1]
    size = int(last["ranks"])
    most = max([size / base, *(float(row["speed_up_interval"][1]) for row in rows)])

    def x(ranks: float) -> float:
        share = math.log(ranks / base) / math.log(size / base)
        return round(LEFT + 8 + (WIDTH - LEFT - RIGHT - 16) * share, 2)

    def y(speed_up: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * speed_up / (most * 1.05), 2)

    points = []
    for row in rows:
        low, high = row["speed_up_interval"]
        label = f"{count(row['ranks'], 'rank')}: {row['speed_up']:.2f} times"
        at = x(row["ranks"]), y(row["speed_up"]), y(low), y(high)
        points.append(SpeedPoint(*at, row["ranks"], label))
    tick = next(s for n in range(9) for s in (10.0**n, 2 * 10.0**n, 5 * 10.0**n) if most / s <= 6)
    return Scaling(
        id=mode,
        title=_NAMES.get(mode, mode),
        text=(
            f"{last['ranks']} ranks are {last['speed_up']:.2f} times as fast as {base}: "
            f"{percent(last['efficiency'])} of the ideal."
        ),
        points=points,
        ideal=(x(base), y(1.0), x(size), y(size / base)),
        ticks=[(y(tick * k), f"{tick * k:g}") for k in range(int(most / tick) + 1)],
        table=_speed_ups(rows),
        lost=_lost(rows),
    )


def _speed_ups(rows: list[dict[str, Any]]) -> Table:
    return Table(
        title="Speed-up over the smallest number of ranks",
        columns=("ranks", "batch", "samples/s", "speed-up", "95 % interval", "efficiency"),
        rows=[
            (
                number(row["ranks"]),
                number(row["global_batch_size"]),
                f"{row['samples_per_s']:,.0f}",
                f"{row['speed_up']:.2f}",
                "–".join(f"{end:.2f}" for end in row["speed_up_interval"]),
                percent(row["efficiency"]),
            )
            for row in rows
        ],
    )


def _lost(rows: list[dict[str, Any]]) -> Table:
    sizes = [f"{row['ranks']}" for row in rows]
    return Table(
        title="Milliseconds of a step, and what is above the ideal",
        columns=("phase", *sizes, *(f"lost at {size}" for size in sizes[1:])),
        rows=[
            (
                name,
                *(f"{row['phases_ms_per_step'].get(name, 0.0):.3f}" for row in rows),
                *(f"{row['lost_ms_per_step'].get(name, 0.0):+.3f}" for row in rows[1:]),
            )
            for name in dict.fromkeys(name for row in rows for name in row["phases_ms_per_step"])
        ],
    )


_LOG_FROM = 8.0
"""The largest value over the least from which an axis is logarithmic."""
_LEAST_APART = 34.0  # between two labels of the x axis


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


def sweep_charts(comparison: Comparison) -> list[SettingChart]:
    """Return a chart for each setting that varies; none if the runs are not of one sweep."""
    if len({run.path.resolve().parent for run in comparison.runs}) > 1:
        return []
    points = [settings_in_sweep(run.path) for run in comparison.runs]
    rows = [
        (name, point, value)
        for name, point, value in zip(comparison.names, points, comparison.best, strict=True)
        if value is not None and math.isfinite(value)
    ]
    if len(rows) < 2 or not all(points):
        return []
    varies = (flag for flag in points[0] if len({point[flag] for point in points}) > 1)
    return [_chart(flag, comparison, rows) for flag in varies]


def settings_in_sweep(run: Path) -> dict[str, str]:
    """Return a sweep run's own values by flag; empty for any other run."""
    points = read_object(run.resolve().parent / SWEEP).get("points")
    point = points.get(run.resolve().name) if isinstance(points, dict) else None
    return {str(k): str(v) for k, v in point.items()} if isinstance(point, dict) else {}


def _chart(
    flag: str, comparison: Comparison, rows: Sequence[tuple[str, dict[str, str], float]]
) -> SettingChart:
    texts = list(dict.fromkeys(point[flag] for _, point, _ in rows))
    places = _places(texts)
    low, high = min(value for *_, value in rows), max(value for *_, value in rows)
    span = high - low or abs(high) or 1.0

    def y(value: float) -> float:
        share = (value - low) / span if high > low else 0.5
        return round(HEIGHT - BOTTOM - 8 - (HEIGHT - TOP - BOTTOM - 16) * share, 2)

    name, point, value = comparison.pick_best(rows, key=lambda row: row[2])
    dots = [
        Dot(
            places[point[flag]],
            y(value),
            f"{name}: {comparison.metric} {number(value)} with "
            + ", ".join(f"{key} {text}" for key, text in point.items()),
        )
        for name, point, value in rows
    ]
    ticks = sorted((places[text], text) for text in texts)
    apart = all(b[0] - a[0] >= _LEAST_APART for a, b in pairwise(ticks))
    return SettingChart(
        id=f"sweep-{flag}",
        setting=flag,
        metric=comparison.metric,
        text=f"The best of {len(rows)} runs is {name}: {comparison.metric} {number(value)} with "
        f"{flag} {point[flag]}.",
        dots=dots,
        x_ticks=ticks if apart else [ticks[0], ticks[-1]],
        y_ticks=[(y(value), f"{value:.3g}") for value in dict.fromkeys((low, high))],
    )


def _places(texts: Sequence[str]) -> dict[str, float]:
    """Return the x of each value: by its number or its logarithm, else in order."""
    try:
        numbers = [float(text) for text in texts]
    except ValueError:
        numbers = []
    if not numbers or not all(map(math.isfinite, numbers)):
        numbers = [float(place) for place in range(len(texts))]
    if min(numbers) > 0 and max(numbers) / min(numbers) >= _LOG_FROM:
        numbers = [math.log(value) for value in numbers]
    low, high = min(numbers), max(numbers)
    width = WIDTH - LEFT - RIGHT - 48
    return {
        text: round(LEFT + 24 + width * (value - low) / ((high - low) or 1.0), 2)
        for text, value in zip(texts, numbers, strict=True)
    }
