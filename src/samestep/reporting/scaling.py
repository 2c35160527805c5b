"""A scaling study, as `samestep scale --json` writes it: speed-up against the ideal."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.errors import UserError
from samestep.reporting.table import Table, number, percent
from samestep.reporting.words import count

LEFT, RIGHT, TOP, BOTTOM = 44.0, 12.0, 12.0, 36.0
WIDTH, HEIGHT = 420.0, 300.0
_NAMES = {"weak": "Weak scaling", "strong": "Strong scaling"}


@dataclass(frozen=True, kw_only=True)
class SpeedPoint:
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
    points: tuple[SpeedPoint, ...]
    ideal: tuple[float, float, float, float]
    """The line of the ideal: x and y of both ends."""
    ticks: tuple[tuple[float, str], ...]
    """Places on the y axis, with their labels."""
    table: Table
    lost: Table


@dataclass(frozen=True, kw_only=True)
class ScalingStudy:
    """All that a study tells."""

    recipe: str
    parts: tuple[Scaling, ...]
    warnings: tuple[str, ...]
    phrase: str


def read_study(path: Path) -> ScalingStudy:
    """Return what a file of `samestep scale RECIPE --json` tells.

    Raises:
        UserError: it is no such file.
    """
    try:
        found = json.loads(path.read_bytes())
        parts = tuple(_part(mode, rows) for mode, rows in found["modes"].items() if len(rows) > 1)
        if not parts:
            raise ValueError("no mode has two numbers of ranks")
        rounds = found["modes"][parts[0].id][0]["rounds"]
        return ScalingStudy(
            recipe=str(found["recipe"]),
            parts=parts,
            warnings=tuple(map(str, found.get("warnings", []))),
            phrase=f"{count(rounds, 'round')}, {number(found.get('seconds'))} s each after warming "
            "up. The bars are 95 % intervals of the speed-up.",
        )
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise UserError(
            f"{path} is no scaling study ({type(error).__name__}: {error}). Write one with: "
            "samestep scale RECIPE --nproc 1,2,4 --json > scaling.json"
        ) from error


def _part(mode: str, rows: list[dict[str, Any]]) -> Scaling:
    base = int(rows[0]["ranks"])
    sizes = [int(row["ranks"]) for row in rows]
    most = max([sizes[-1] / base, *(float(row["speed_up_interval"][1]) for row in rows)])

    def x(ranks: float) -> float:
        share = math.log(ranks / base) / math.log(sizes[-1] / base)
        return round(LEFT + 8 + (WIDTH - LEFT - RIGHT - 16) * share, 2)

    def y(speed_up: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * speed_up / (most * 1.05), 2)

    points = tuple(
        SpeedPoint(
            x=x(row["ranks"]),
            y=y(row["speed_up"]),
            low=y(row["speed_up_interval"][0]),
            high=y(row["speed_up_interval"][1]),
            ranks=row["ranks"],
            label=f"{count(row['ranks'], 'rank')}: {row['speed_up']:.2f} times",
        )
        for row in rows
    )
    last = rows[-1]
    return Scaling(
        id=mode,
        title=_NAMES.get(mode, mode),
        text=(
            f"{last['ranks']} ranks are {last['speed_up']:.2f} times as fast as {base}: "
            f"{percent(last['efficiency'])} of the ideal."
        ),
        points=points,
        ideal=(x(base), y(1.0), x(sizes[-1]), y(sizes[-1] / base)),
        ticks=tuple((y(value), f"{value:g}") for value in _ticks(most)),
        table=_table(rows),
        lost=_lost(rows),
    )


def _ticks(most: float) -> list[float]:
    step = next(s for n in range(9) for s in (10.0**n, 2 * 10.0**n, 5 * 10.0**n) if most / s <= 6)
    return [step * k for k in range(int(most / step) + 1)]


def _table(rows: list[dict[str, Any]]) -> Table:
    head = ("ranks", "batch", "samples/s", "speed-up", "95 % interval", "efficiency")
    told = [
        (
            number(row["ranks"]),
            number(row["global_batch_size"]),
            f"{row['samples_per_s']:,.0f}",
            f"{row['speed_up']:.2f}",
            "–".join(f"{end:.2f}" for end in row["speed_up_interval"]),
            percent(row["efficiency"]),
        )
        for row in rows
    ]
    return Table(title="Speed-up over the smallest number of ranks", columns=head, rows=tuple(told))


def _lost(rows: list[dict[str, Any]]) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row["phases_ms_per_step"]))
    head = (
        "phase",
        *(f"{row['ranks']}" for row in rows),
        *(f"lost at {r['ranks']}" for r in rows[1:]),
    )
    told = [
        (
            name,
            *(f"{row['phases_ms_per_step'].get(name, 0.0):.3f}" for row in rows),
            *(f"{row['lost_ms_per_step'].get(name, 0.0):+.3f}" for row in rows[1:]),
        )
        for name in names
    ]
    caption = "Milliseconds of a step, and what is above the ideal"
    return Table(title=caption, columns=head, rows=tuple(told))
