"""A scaling study, as `samestep scale --json` writes it: speed-up against the ideal."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from samestep.base.errors import UserError
from samestep.base.table import Table, number, percent
from samestep.base.words import count

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
    ideal: tuple[float, float, float, float]
    """The line of the ideal: x and y of both ends."""
    ticks: list[tuple[float, str]]
    """Places on the y axis, with their labels."""
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
    """Return what a file of `samestep scale RECIPE --json` tells; else raise UserError."""
    try:
        found = json.loads(path.read_bytes())
        parts = [_part(mode, rows) for mode, rows in found["modes"].items() if len(rows) > 1]
        if not parts:
            raise ValueError("no mode has two numbers of ranks")
        rounds = found["modes"][parts[0].id][0]["rounds"]
        return ScalingStudy(
            recipe=str(found["recipe"]),
            parts=parts,
            warnings=[str(text) for text in found.get("warnings", [])],
            phrase=f"{count(rounds, 'round')}, {number(found.get('seconds'))} s each after warming "
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


def _part(mode: str, rows: list[dict[str, Any]]) -> Scaling:
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
