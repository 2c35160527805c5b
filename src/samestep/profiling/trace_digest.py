"""Read a trace: how much of what the steps compute is work, and of which kind."""

import re
from collections import defaultdict
from collections.abc import Sequence

from samestep.profiling.intervals import Interval, common, length, union
from samestep.profiling.measured import Operations
from samestep.profiling.on_device import kernels, split_device
from samestep.profiling.on_host import split_host
from samestep.profiling.trace_events import (
    COLLATE,
    READ,
    Event,
    IntervalIndex,
    calls,
    multiplies,
    of_optimizers,
    phases_of,
    span,
)
from samestep.run.phase_names import COMPUTE

_READS_ITSELF = ("enumerate(DataLoader)#", "aten::_fused")
_COLLATE = re.compile(r"aten::(stack|cat|concat|pin_memory)")


def digest(events: Sequence[Event], steps: int) -> Operations:
    """Return what the operations of a trace of so many steps were."""
    phases = phases_of(events)
    compute = union(time for phase, time in phases if phase in COMPUTE)
    if not compute or not steps:
        return Operations()
    waits = union(time for phase, time in phases if phase == "data")
    on_device = bool(kernels(events))
    split = (
        split_device(events, compute, waits, steps) if on_device else split_host(events, compute)
    )
    whole = split.whole or 1.0
    top: dict[bool, dict[str, float]] = {kind: defaultdict(float) for kind in (True, False)}
    for name, duration in split.names.items():
        top[multiplies(name)][_short(name)] += duration / whole
    return Operations(
        launch=split.launch / whole,
        matmul=split.matmul / whole,
        memory=split.memory / whole,
        sync=split.sync / whole,
        count=len(IntervalIndex(compute).among(calls(events))) / steps,
        syncs=_count_reads(events) / steps,
        collate=_collate_share(events, waits),
        top_matmul=_most(top[True]),
        top_memory=_most(top[False]),
    )


def _most(names: dict[str, float]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(names.items(), key=lambda item: -item[1])[:5])


def _count_reads(events: Sequence[Event]) -> int:
    """Count the numbers read from tensors, without those that PyTorch reads for itself.

    Optimizers read their counters and loaders their seeds; all of these lie on the CPU.
    """
    itself = IntervalIndex(
        union(
            span(event)
            for event in events
            if event.get("ph") == "X" and event["name"].startswith(_READS_ITSELF)
        )
    )
    optimizers = IntervalIndex(of_optimizers(events))
    reads = [event for event in calls(events) if event["name"] == READ]
    return sum(itself.of(one["ts"]) < 0 and optimizers.of(one["ts"]) < 0 for one in reads)


def _collate_share(events: Sequence[Event], waits: list[Interval]) -> float:
    """Return the share of the wait for data in which samples were put together to a batch."""
    if not waits:
        return 0.0
    spans = union(
        span(event)
        for event in events
        if event.get("ph") == "X" and (event["name"] == COLLATE or _COLLATE.match(event["name"]))
    )
    return length(common(spans, waits)) / length(waits)


def _short(name: str) -> str:
    return name.removeprefix("aten::").split("(")[0].split("<")[0][-40:]
