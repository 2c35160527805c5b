"""Read a trace: how much of what the steps compute is work, and of which kind.

On the CPU that is work, the starting of operations, and loops that read numbers. The same call in
the same place of each step is one measurement repeated, and its median counts, so that a step in
which another program had the core does not. On a GPU the kernels are work; where none runs, it
waits for the host.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from samestep.profiling.intervals import Interval, common, length, lengths_in, union, without
from samestep.profiling.measured import Operations
from samestep.profiling.trace_events import (
    COLLATE,
    FLOOR,
    INDEX,
    READ,
    Event,
    IntervalIndex,
    calls,
    communicates,
    multiplies,
    of_optimizers,
    own_times,
    phases_of,
    short_name,
    span,
    spans_of,
    works,
)
from samestep.run.phase_names import COMPUTE

_COLLATES = (COLLATE, "aten::stack", "aten::cat", "aten::concat", "aten::pin_memory")
_ON_GPU = ("kernel", "gpu_memset", "gpu_memcpy")
_WAITS = re.compile(r"cuda(Stream|Device|Event)Synchronize|cudaMemcpy$|hip\w+Synchronize")
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


def digest(events: Sequence[Event], steps: int) -> Operations:
    """Return what the operations of a trace of so many steps were."""
    phases = phases_of(events)
    compute = union(time for phase, time in phases if phase in COMPUTE)
    if not compute or not steps:
        return Operations()
    waits = union(time for phase, time in phases if phase == "data")
    if any(event.get("cat") in _ON_GPU for event in events):
        split = _split_device(events, compute, waits, steps)
    else:
        split = _split_host(events, compute)
    whole = split.matmul + split.memory + split.launch + split.sync or 1.0
    top: dict[bool, dict[str, float]] = {kind: defaultdict(float) for kind in (True, False)}
    for name, duration in split.names.items():
        top[multiplies(name)][short_name(name)] += duration / whole
    most = {kind: tuple(sorted(top[kind].items(), key=lambda item: -item[1])[:5]) for kind in top}
    put_together = common(spans_of(events, *_COLLATES), waits)
    return Operations(
        gpu_busy=_gpu_busy(events, steps),
        launch=split.launch / whole,
        matmul=split.matmul / whole,
        memory=split.memory / whole,
        sync=split.sync / whole,
        count=len(IntervalIndex(compute).among(calls(events))) / steps,
        syncs=_count_reads(events) / steps,
        collate=length(put_together) / length(waits) if waits else 0.0,
        top_matmul=most[True],
        top_memory=most[False],
    )


def _count_reads(events: Sequence[Event]) -> int:
    """Count the numbers read from tensors, without those that PyTorch reads for itself.

    Optimizers read their counters, loaders their seeds, and tensors that are an index are read
    too; all of these lie on the CPU.
    """
    others = spans_of(events, "enumerate(DataLoader)#", "aten::_fused", INDEX)
    itself = IntervalIndex(union([*others, *of_optimizers(events)]))
    return sum(itself.of(e["ts"]) < 0 for e in calls(events) if e["name"] == READ)


def _gpu_busy(events: Sequence[Event], steps: int) -> float | None:
    """Return the seconds per step in which a GPU ran a kernel; copies and memsets are none."""
    if not any(event.get("cat") in _ON_GPU for event in events):
        return None
    kernels = union(span(event) for event in events if event.get("cat") == "kernel")
    return length(kernels) / steps / 1e6


def _split_device(
    events: Sequence[Event], compute: list[Interval], waits: list[Interval], steps: int
) -> ComputeSplit:
    """Split what a GPU did in some steps.

    `compute` is when the host was in the phases that compute; it runs ahead of the device. `waits`
    is when the host waited for data: a device that idles then waits for data, too.
    """
    ran = [event for event in events if event.get("cat") in _ON_GPU]
    window = (compute[0][0], max(compute[-1][1], *(span(event)[1] for event in ran)))
    computing = [event for event in ran if not communicates(event["name"])]
    arithmetic = union(span(event) for event in computing if multiplies(event["name"]))
    all_of_it = union(span(event) for event in computing)
    idle = without([window], union([*(span(event) for event in ran), *waits]))
    syncs = union(
        span(e) for e in events if e.get("cat") == "cuda_runtime" and _WAITS.match(e["name"])
    )
    # The device runs dry while the host waits for it, and idles until the host has caught up.
    waited = lengths_in(idle, syncs)
    drained = length(gap for gap, seconds in zip(idle, waited, strict=True) if seconds > 0)
    matmul = length(common(arithmetic, [window]))
    split = ComputeSplit(
        matmul=matmul / steps,
        memory=(length(common(all_of_it, [window])) - matmul) / steps,
        sync=drained / steps,
        launch=(length(idle) - drained) / steps,
    )
    for event in computing:
        split.names[event["name"]] += event["dur"] / steps
    return split


def _split_host(events: Sequence[Event], compute: list[Interval]) -> ComputeSplit:
    """Split what was computed in some intervals by calls of the host."""
    host = IntervalIndex(compute).among(calls(events))
    every = spans_of(events, "ProfilerStep#")
    computed = lengths_in(every, compute)
    steps = [step for step, seconds in zip(every, computed, strict=True) if seconds > 0]
    steps = steps or [(compute[0][0], compute[-1][1])]
    where = IntervalIndex(steps)
    itself = IntervalIndex(union([*of_optimizers(events), *spans_of(events, INDEX)]))
    chains = common(union(_chains(host, where, itself)), compute)
    reading = IntervalIndex(chains)
    # An operation that does no work takes what the trace itself has measured.
    floors = [call["dur"] for call in IntervalIndex(spans_of(events, FLOOR)).among(calls(events))]
    least = _NO_WORK_FLOORS * (median(floors) if floors else _DEFAULT_FLOOR_US)
    work, rest = [], []
    for event, own in own_times(host):
        if reading.of(event["ts"]) < 0:
            name, step = event["name"], where.of(event["ts"])
            beyond = max(0.0, own - least) if works(name) else 0.0
            work.append((name, step, beyond))
            rest.append((name, step, own - beyond))
    # The time in which no call ran belongs to the call that followed.
    followed = {event["ts"]: event["name"] for event in reversed(host)}
    between = [
        (followed.get(end, "the end"), where.of(begin), end - begin)
        for begin, end in without(without(compute, chains), union(span(event) for event in host))
    ]
    names = _per_step(work, len(steps))
    launch = sum(sum(_per_step(one, len(steps)).values()) for one in (rest, between))
    return ComputeSplit(
        matmul=sum(time for name, time in names.items() if multiplies(name)),
        memory=sum(time for name, time in names.items() if not multiplies(name)),
        launch=launch,
        sync=median(lengths_in(steps, chains)),
        names=names,
    )


def _per_step(pieces: Iterable[tuple[str, int, float]], num_steps: int) -> dict[str, float]:
    """Return the median µs per step of each name, from pieces that are (name, step, µs).

    The n-th piece of a name is the same call in each step.
    """
    values: dict[tuple[str, int], list[float]] = defaultdict(list)
    seen: Counter[tuple[str, int]] = Counter()
    for name, step, value in pieces:
        values[name, seen[name, step]].append(value)
        seen[name, step] += 1
    sums: dict[str, float] = defaultdict(float)
    for (name, _), same in values.items():
        sums[name] += median(same) * len(same) / num_steps
    return sums


def _chains(
    host: Sequence[Event], where: IntervalIndex, itself: IntervalIndex
) -> Iterator[Interval]:
    """Yield the time from one read of a number to the next, in loops that read again and again.

    What PyTorch reads for itself is not the script's to change.
    """
    before: float | None = None
    between = 0
    for event in host:
        if event["name"] != READ or itself.of(event["ts"]) >= 0:
            between += "::" in event["name"]
            continue
        if before is not None and where.of(before) == where.of(event["ts"]) and between <= _CHAIN:
            yield before, event["ts"]
        before, between = event["ts"], 0
