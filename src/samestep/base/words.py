"""Words and lines of what is shown to people."""

import math
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any


def count(number: int, noun: str) -> str:
    """Return a number with its noun: 1 rank, 1,000 ranks."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def short(number: float) -> str:
    """Return a number in at most five characters: 942, 9.42k, 94.2k, 9.42M."""
    for unit in ("", "k", "M", "G"):
        if number < 999.5:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}T"


NOT_FINITE = "not finite"


def measured(value: float | None) -> str:
    """Return a loss, a metric or a probability as text: 0.1234, 1.23e-06, 12,345."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return NOT_FINITE
    if 1e4 <= abs(value) < 1e7:
        return f"{value:,.0f}"
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 or value == 0 else f"{value:.2e}"


def size(num_bytes: float) -> str:
    """Return bytes in decimal units: 942 bytes, 9.42 kB, 94.2 MB, 9.42 GB."""
    if num_bytes < 1000:
        return count(round(num_bytes), "byte")
    number = float(num_bytes)
    for unit in ("kB", "MB", "GB"):
        number /= 1000
        if number < 999.5:
            return f"{number:.3g} {unit}"
    return f"{number / 1000:.3g} TB"


def duration(seconds: float) -> str:
    """Return seconds as H:MM:SS, or M:SS below an hour; fewer than ten as such: 0.4 s."""
    if seconds < 9.5:
        return f"{seconds:.2g} s"
    minutes, seconds_left = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds_left:02}" if hours else f"{minutes}:{seconds_left:02}"


def joined(parts: Iterable[object]) -> str:
    """Return one part or more as a sentence has them: A; A and B; A, B and C."""
    *most, last = map(str, parts)
    return f"{', '.join(most)} and {last}" if most else last


def ranks(sizes: Iterable[int]) -> str:
    """Return one or more numbers of ranks as a sentence has them: 1 rank; 1, 2 and 3 ranks."""
    sizes = list(sizes)
    return f"{joined(sizes)} rank{'' if sizes == [1] else 's'}"


def number(value: object) -> str:
    """Return a number as a table shows it; NaN and infinity are "not finite"."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "–" if value is None else str(value)
    if abs(value) > sys.float_info.max or math.isnan(value):
        return NOT_FINITE
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


def as_typed(value: object) -> str:
    """Return the value of a setting as it can be typed: 0.001, true, 64 32."""
    if isinstance(value, tuple | list):
        return " ".join(map(as_typed, value))
    if isinstance(value, float):
        text = f"{value:g}"
        return text if float(text) == value else repr(float(value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def flatten(table: Mapping[str, Any], prefix: str = "", by: str = "/") -> dict[str, Any]:
    """Return a table without nesting: {"a": {"b": 1}} becomes {"a/b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}{by}", by)
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def local_time(seconds: float) -> str:
    """Return a time, in seconds since 1970, in the local time zone: 2026-11-29 13:45."""
    return f"{datetime.fromtimestamp(seconds, UTC).astimezone():%Y-%m-%d %H:%M}"


def shortened(text: str, most: int) -> str:
    """Return a text without its end if it has more characters than that."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def wrapped(text: str, indent: str = "", width: int = 80) -> Iterator[str]:
    """Yield a text as lines; all but the first begin with the indent."""
    yield from textwrap.wrap(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


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
        if isinstance(value, float) and math.isfinite(value) and "e" not in f"{value:.6g}":
            return f"{value:.{self._decimals[name]}f}"
        return word(value)


def word(value: Any) -> str:
    """Return a number, a word, or a list or dict of them, as it is shown."""
    if isinstance(value, float):
        return f"{value:.6g}" if math.isfinite(value) else NOT_FINITE
    if isinstance(value, list):
        return " ".join(map(word, value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {word(part)}" for name, part in value.items())
    return "-" if value is None else str(value)


def _decimals(value: float) -> int:
    """Return the number of decimals if a value is shown with six digits."""
    return len(f"{value:.6g}".partition(".")[2].partition("e")[0])


_HEIGHTS = "▁▂▃▄▅▆▇█"
_BROKEN = "×"


def sparkline(values: Sequence[float], width: int = 12) -> str:
    """Return numbers as at most `width` characters, lowest ▁ to highest █.

    Of more numbers than that, each character is the mean of some that follow one another. NaN and
    infinity are ×, as is a mean that has one of them in it.
    """
    count = min(width, len(values))
    edges = [place * len(values) // count for place in range(count + 1)] if count else [0]
    parts = [values[edges[n] : edges[n + 1]] for n in range(count)]
    # In units of the largest: sums and differences of the largest floats would be infinite.
    unit = max((abs(value) for value in values if math.isfinite(value)), default=0.0) or 1.0
    means = [sum(value / unit for value in part) / len(part) for part in parts]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_HEIGHTS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        _HEIGHTS[round((mean - low) * scale)] if math.isfinite(mean) else _BROKEN for mean in means
    )


BOTH, FIRST, SECOND = "●", "○", "×"
LABEL = 9
"""Columns of the axis labels."""


def curve_lines(
    first: Sequence[float], second: Sequence[float], width: int, height: int
) -> list[str]:
    """Draw two curves of equally many points with characters; return the lines.

    The width includes the labels of the axis.
    """
    columns = max(1, min(width - LABEL, len(first)))
    edges = [len(first) * column // columns for column in range(columns + 1)]
    curves = [
        [math.fsum(values[a:b]) / (b - a) for a, b in pairwise(edges)] for values in (first, second)
    ]
    low, high = min(map(min, curves)), max(map(max, curves))
    span = (high - low) or 1.0
    rows = [[round((high - mean) / span * (height - 1)) for mean in means] for means in curves]
    marks = {(True, True): BOTH, (True, False): FIRST, (False, True): SECOND}
    lines = []
    for row in range(height):
        places = zip(*rows, strict=True)
        points = "".join(marks.get((ours == row, theirs == row), " ") for ours, theirs in places)
        value = high - span * row / max(1, height - 1)
        label = f"{value:.2g}" if row in (0, height - 1) else ""
        lines.append(f"{label:>{LABEL - 1}} {points}".rstrip())
    return lines


_MOST_CLASSES = 20
_MOST_MISTAKES = 3


def class_table(per_class: Mapping[str, float | None], confusion: list[list[int]]) -> list[str]:
    """Return a line for each class, or none where there are more than 20.

    The confusion has counts, row by target, column by prediction, in the order of the names.
    """
    names = list(per_class)
    if not names or len(names) > _MOST_CLASSES:
        return []
    width = max(len(name) for name in names)
    lines = []
    for (name, accuracy), row in zip(per_class.items(), confusion, strict=True):
        shown = "no samples" if accuracy is None else f"{accuracy:.4f}"
        counted = sorted(zip(row, names, strict=True), key=lambda pair: -pair[0])
        mistakes = [f"{other} {count:,}" for count, other in counted if count and other != name]
        taken = ", ".join(mistakes[:_MOST_MISTAKES])
        lines.append(f"{name:<{width}}  {shown}{f'  predicted as {taken}' if taken else ''}")
    return lines
