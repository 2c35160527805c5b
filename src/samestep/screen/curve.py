"""Two curves as characters: where they lie on each other, and where one is alone."""

from collections.abc import Sequence
from itertools import pairwise

BOTH, FIRST, SECOND = "●", "○", "×"
LABEL = 9
"""Columns of the axis's numbers."""


def curve_lines(
    first: Sequence[float], second: Sequence[float], width: int, height: int
) -> list[str]:
    """Return lines of characters: two curves of equally many points over the same axis.

    Args:
        first: values, left to right; at least one.
        second: as many.
        width: columns in all, with the numbers of the axis.
        height: lines.
    """
    columns = max(1, min(width - LABEL, len(first)))
    ours, theirs = _binned(first, columns), _binned(second, columns)
    low, high = min(*ours, *theirs), max(*ours, *theirs)
    span = (high - low) or 1.0

    def row_of(value: float) -> int:
        return round((high - value) / span * (height - 1))

    lines = []
    for row in range(height):
        points = ""
        for one, other in zip(ours, theirs, strict=True):
            here = row_of(one) == row, row_of(other) == row
            points += {(True, True): BOTH, (True, False): FIRST, (False, True): SECOND}.get(
                here, " "
            )
        value = high - span * row / max(1, height - 1)
        label = f"{value:.2g}" if row in (0, height - 1) else ""
        lines.append(f"{label:>{LABEL - 1}} {points}".rstrip())
    return lines


def _binned(values: Sequence[float], columns: int) -> list[float]:
    """Return the mean of each of so many parts."""
    edges = [len(values) * column // columns for column in range(columns + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges) if b > a]
