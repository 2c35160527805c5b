"""A curve in a few characters: ▇▅▃▂▁."""

import math
from collections.abc import Sequence

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
    return "".join(_height(mean, low, high) for mean in means)


def _height(mean: float, low: float, high: float) -> str:
    if not math.isfinite(mean):
        return _BROKEN
    top = len(_HEIGHTS) - 1
    return _HEIGHTS[round((mean - low) / (high - low) * top) if high > low else 0]
