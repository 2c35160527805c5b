"""What a test tells of each class: its accuracy, and what it is taken for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samestep.reporting.run_data import RunData
from samestep.reporting.table import Table, number
from samestep.run.files import read_object

MOST_ROWS = 50
"""More classes than these are too many for a table of all, and for a square of all by all."""
_WITH_NUMBERS = 20
LEVELS = 10


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """The confusion matrix: row by target, column by prediction."""

    names: tuple[str, ...]
    rows: tuple[tuple[tuple[int, int], ...], ...]
    """(count, level of its colour from 0 to 10) of each cell."""
    with_numbers: bool


@dataclass(frozen=True, kw_only=True)
class ByClass:
    """Accuracy of each class, and the confusion matrix where it can be shown."""

    split: str
    summary: str
    table: Table
    heat: HeatMap | None


def by_class(run: RunData) -> ByClass | None:
    """Return what the latest evaluation tells of each class, the test's before the validation's."""
    test = read_object(run.path / "result.json").get("test")
    found = [("test", test)] if isinstance(test, dict) else []
    for split in ("test", "validation"):
        found += [(split, r) for r in run.of("evaluation")[::-1] if r.get("split") == split]
    for split, record in found:
        accuracies = record.get("per_class")
        if isinstance(accuracies, dict) and accuracies:
            known = {n: v if _is_share(v) else None for n, v in accuracies.items()}
            return _by_class(split, known, _square(record.get("confusion"), len(accuracies)))
    return None


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value <= 1


def _square(found: Any, size: int) -> list[list[int]] | None:
    """Return a confusion matrix if it is one of this size, with counts alone."""
    if not isinstance(found, list) or len(found) != size:
        return None
    for row in found:
        if not isinstance(row, list) or len(row) != size:
            return None
        if not all(isinstance(cell, int) and cell >= 0 for cell in row):
            return None
    return found


def _by_class(
    split: str, accuracies: Mapping[str, float | None], confusion: list[list[int]] | None
) -> ByClass:
    names = list(accuracies)
    known = [name for name in names if accuracies[name] is not None]
    worst = sorted(known, key=lambda name: accuracies[name] or 0.0)
    shown = worst if len(names) > MOST_ROWS else [*worst, *(n for n in names if n not in known)]
    place = {name: at for at, name in enumerate(names)}
    rows = []
    for name in shown[:MOST_ROWS]:
        row = confusion[place[name]] if confusion else []
        accuracy = accuracies[name]
        taken = _taken_for(row, names, place[name])
        rows.append((name, _accuracy(accuracy), number(sum(row)) if row else "–", taken or "–"))
    note = ""
    if len(names) > MOST_ROWS:
        note = (
            f"The {len(rows)} classes with the lowest accuracy, of {len(names):,}. A confusion "
            "matrix of all classes would be too large to show."
        )
    heat = _heat(names, confusion) if confusion and len(names) <= MOST_ROWS else None
    return ByClass(
        split=split,
        summary=_summary(accuracies, worst),
        table=Table(
            title=f"Accuracy by class on the {split} set, the lowest first",
            columns=("class", "accuracy", "samples", "taken for"),
            rows=tuple(rows),
            note=note,
        ),
        heat=heat,
    )


def _accuracy(value: float | None) -> str:
    """Return an accuracy as a table has it: 98.0 % and 98.4 % are not the same."""
    return "no samples" if value is None else f"{100 * value:.1f}\N{NO-BREAK SPACE}%"


def _summary(accuracies: Mapping[str, float | None], worst: Sequence[str]) -> str:
    if not worst:
        return f"{len(accuracies):,} classes, none of which has samples."
    low, high = worst[0], worst[-1]
    return (
        f"{len(accuracies):,} classes: from {_accuracy(accuracies[low])} ({low}) to "
        f"{_accuracy(accuracies[high])} ({high})."
    )


def _taken_for(row: Sequence[int], names: Sequence[str], own: int) -> str:
    others = sorted(((c, at) for at, c in enumerate(row) if c and at != own), reverse=True)
    return ", ".join(f"{names[at]} ({c:,})" for c, at in others[:3])


def _heat(names: Sequence[str], confusion: Sequence[Sequence[int]]) -> HeatMap:
    rows = []
    for row in confusion:
        whole = sum(row) or 1  # by the row: a rare class is as visible as a common one
        rows.append(tuple((cell, -(-LEVELS * cell // whole)) for cell in row))
    return HeatMap(names=tuple(names), rows=tuple(rows), with_numbers=len(names) <= _WITH_NUMBERS)
