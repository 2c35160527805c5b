"""What a step computes on the CPU: work, the starting of operations, loops that read numbers.

The same call in the same place of each step is one measurement repeated, and its median counts, so
that a step in which another program had the core does not.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from samestep.profiling.intervals import Interval, common, lengths_in, union, without
from samestep.profiling.trace_events import (
    FLOOR,
    READ,
    Event,
    IntervalIndex,
    calls,
    multiplies,
    of_optimizers,
    own_times,
    span,
    spans_of,
    works,
)

_CHAIN = 25
"""So few calls, nested ones too, lie between two reads of numbers in a loop that does no more."""
_DEFAULT_FLOOR_US = 2.0
_NO_WORK_FLOORS = 3
"""Up to so many times an operation on one number, it still is more overhead than work."""


@dataclass
class ComputeSplit:
    """µs per step of what the steps compute, by what limits it."""

    matmul: float = 0.0
    memory: float = 0.0
    launch: float = 0.0
    sync: float = 0.0
    names: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Each operation's work."""

    @property
    def whole(self) -> float:
        """All of it."""
        return self.matmul + self.memory + self.launch + self.sync


def split_host(events: Sequence[Event], compute: list[Interval]) -> ComputeSplit:
    """ComputeSplit what was computed in some intervals by calls of the host."""
    host = IntervalIndex(compute).among(calls(events))
    every = spans_of(events, "ProfilerStep#")
    computed = lengths_in(every, compute)
    steps = [step for step, length in zip(every, computed, strict=True) if length > 0]
    steps = steps or [(compute[0][0], compute[-1][1])]
    where = IntervalIndex(steps)
    chains = common(union(_chains(host, where, IntervalIndex(of_optimizers(events)))), compute)
    result = ComputeSplit(sync=median(lengths_in(steps, chains)))
    least = _NO_WORK_FLOORS * _floor(events)
    beyond, below = _Repeated(len(steps)), _Repeated(len(steps))
    reading = IntervalIndex(chains)
    for event, own in own_times(host):
        if reading.of(event["ts"]) < 0:
            step = where.of(event["ts"])
            work = max(0.0, own - least) if works(event["name"]) else 0.0
            beyond.add(event["name"], step, work)
            below.add(event["name"], step, own - work)
    # The time in which no call ran belongs to the call that followed.
    between = _Repeated(len(steps))
    followed = {event["ts"]: str(event["name"]) for event in reversed(host)}
    for begin, end in without(without(compute, chains), union(span(event) for event in host)):
        between.add(followed.get(end, "the end"), where.of(begin), end - begin)
    result.names = beyond.a_step()
    for name, work in result.names.items():
        if multiplies(name):
            result.matmul += work
        else:
            result.memory += work
    result.launch = sum(below.a_step().values()) + sum(between.a_step().values())
    return result


class _Repeated:
    """µs of the same calls in each step: the n-th of a name is the same one."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._values: dict[tuple[str, int], list[float]] = defaultdict(list)
        self._seen: dict[tuple[str, int], int] = defaultdict(int)

    def add(self, name: str, step: int, value: float) -> None:
        """Add a value of a step."""
        self._values[name, self._seen[name, step]].append(value)
        self._seen[name, step] += 1

    def a_step(self) -> dict[str, float]:
        """Return the median µs per step of each name."""
        sums: dict[str, float] = defaultdict(float)
        for (name, _), values in self._values.items():
            sums[name] += median(values) * len(values) / self._num_steps
        return sums


def _chains(
    host: Sequence[Event], where: IntervalIndex, optimizers: IntervalIndex
) -> Iterator[Interval]:
    """Yield the time from one read of a number to the next, in loops that read again and again.

    What optimizers read for themselves is not the script's to change.
    """
    before: float | None = None
    between = 0
    for event in host:
        if event["name"] != READ or optimizers.of(event["ts"]) >= 0:
            between += "::" in event["name"]
            continue
        if before is not None and where.of(before) == where.of(event["ts"]) and between <= _CHAIN:
            yield before, event["ts"]
        before, between = event["ts"], 0


def _floor(events: Sequence[Event]) -> float:
    """Return the µs of an operation that does no work, as the trace itself has measured it."""
    floor = IntervalIndex(spans_of(events, FLOOR))
    durations = [event["dur"] for event in floor.among(calls(events))]
    return median(durations) if durations else _DEFAULT_FLOOR_US
