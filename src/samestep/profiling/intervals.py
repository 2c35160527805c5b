"""Spans of time on one axis: what they cover together, and what two sets of them share."""

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]
"""Begin and end."""


def union(spans: Iterable[Interval]) -> list[Interval]:
    """Return the same time as intervals in order; those that overlap become one."""
    merged: list[Interval] = []
    for begin, end in sorted(spans):
        if merged and begin < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def length(spans: Iterable[Interval]) -> float:
    """Return how long intervals are that do not overlap."""
    return sum(end - begin for begin, end in spans)


def common(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return what two sets of intervals share; each is in order and does not overlap itself."""
    shared: list[Interval] = []
    i = j = 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            shared.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return shared


def gaps(covered: Sequence[Interval], window: Interval) -> list[Interval]:
    """Return what of a window none of some intervals covers; they are in order, none overlaps."""
    inside = common(covered, [window])
    edges = [window[0], *(edge for one in inside for edge in one), window[1]]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


def without(spans: Iterable[Interval], taken: Sequence[Interval]) -> list[Interval]:
    """Return what of some intervals others do not cover."""
    return [gap for one in spans for gap in gaps(taken, one)]
