"""Rows of named numbers and words as columns, block by block as they come."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


class Columns:
    """Columns below their headings; a later block may widen them, and never narrows them."""

    def __init__(self) -> None:
        self._widths: dict[str, int] = {}
        self._decimals: dict[str, int] = {}

    def lines(self, rows: Sequence[Row], *, heading: bool) -> Iterator[str]:
        """Yield rows, which have the same names, as lines; the headings first if asked for."""
        names = list(rows[0])
        for name in names:
            floats = [row[name] for row in rows if isinstance(row[name], float)]
            decimals = max((_decimals(value) for value in floats), default=0)
            self._decimals[name] = max(self._decimals.get(name, 0), decimals)
            widest = max(len(self._word(name, row[name])) for row in rows)
            self._widths[name] = max(self._widths.get(name, len(name)), widest)
        if heading:
            yield "  ".join(f"{name:>{self._widths[name]}}" for name in names)
        for row in rows:
            words = (f"{self._word(name, row[name]):>{self._widths[name]}}" for name in names)
            yield "  ".join(words)

    def _word(self, name: str, value: Any) -> str:
        if isinstance(value, float) and "e" not in f"{value:.6g}":
            return f"{value:.{self._decimals[name]}f}"
        return word(value)


def word(value: Any) -> str:
    """Return a number, a word, or a list or dict of them, as it is shown."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return " ".join(map(word, value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {word(part)}" for name, part in value.items())
    return "-" if value is None else str(value)


def _decimals(value: float) -> int:
    """Return how many decimals a number has when it is shown with six digits."""
    return len(f"{value:.6g}".partition(".")[2].partition("e")[0])
