"""Read a trace: how much of what the steps compute is work, and of which kind."""

from collections import defaultdict
from collections.abc import Sequence

from samestep.profiling.intervals import common, length, union
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
    spans_of,
)
from samestep.run.phase_names import COMPUTE

_COLLATES = (COLLATE, "aten::stack", "aten::cat", "aten::concat", "aten::pin_memory")


def digest(events: Sequence[Event], steps: int) -> Operations:
    """Return what the operations of a trace of so many steps were."""
    phases = phases_of(events)
    compute = union(time for phase, time in phases if phase in COMPUTE)
    if not compute or not steps:
        return Operations()
    waits = union(time for phase, time in phases if phase == "data")
    if kernels(events):
        split = split_device(events, compute, waits, steps)
    else:
        split = split_host(events, compute)
    whole = split.whole or 1.0
    top: dict[bool, dict[str, float]] = {kind: defaultdict(float) for kind in (True, False)}
    for name, duration in split.names.items():
        short = name.removeprefix("aten::").split("(")[0].split("<")[0][-40:]
        top[multiplies(name)][short] += duration / whole
    put_together = common(spans_of(events, *_COLLATES), waits)
    return Operations(
        launch=split.launch / whole,
        matmul=split.matmul / whole,
        memory=split.memory / whole,
        sync=split.sync / whole,
        count=len(IntervalIndex(compute).among(calls(events))) / steps,
        syncs=_count_reads(events) / steps,
        collate=length(put_together) / length(waits) if waits else 0.0,
        top_matmul=_most(top[True]),
        top_memory=_most(top[False]),
    )


def _most(names: dict[str, float]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(names.items(), key=lambda item: -item[1])[:5])


def _count_reads(events: Sequence[Event]) -> int:
    """Count the numbers read from tensors, without those that PyTorch reads for itself.

    Optimizers read their counters and loaders their seeds; all of these lie on the CPU.
    """
    others = spans_of(events, "enumerate(DataLoader)#", "aten::_fused")
    itself = IntervalIndex(union([*others, *of_optimizers(events)]))
    return sum(itself.of(e["ts"]) < 0 for e in calls(events) if e["name"] == READ)
