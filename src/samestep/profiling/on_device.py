"""What a step computes on a GPU: its kernels are work; where none runs, it waits for the host."""

import re
from collections.abc import Sequence

from samestep.profiling.intervals import Interval, common, length, lengths_in, union, without
from samestep.profiling.on_host import ComputeSplit
from samestep.profiling.trace_events import Event, communicates, multiplies, span

_WAITS = re.compile(r"cuda(Stream|Device|Event)Synchronize|cudaMemcpy$|hip\w+Synchronize")


def kernels(events: Sequence[Event]) -> list[Event]:
    """Return what ran on a GPU."""
    work = ("kernel", "gpu_memset", "gpu_memcpy")
    return [event for event in events if event.get("cat") in work]


def split_device(
    events: Sequence[Event], compute: list[Interval], waits: list[Interval], steps: int
) -> ComputeSplit:
    """Split what a GPU did in some steps.

    `compute` is when the host was in the phases that compute; it runs ahead of the device. `waits`
    is when the host waited for data: a device that idles then waits for data, too.
    """
    ran = kernels(events)
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
    drained = [gap for gap, seconds in zip(idle, waited, strict=True) if seconds > 0]
    matmul = length(common(arithmetic, [window]))
    split = ComputeSplit(
        matmul=matmul / steps,
        memory=(length(common(all_of_it, [window])) - matmul) / steps,
        sync=length(drained) / steps,
        launch=(length(idle) - length(drained)) / steps,
    )
    for event in computing:
        split.names[event["name"]] += event["dur"] / steps
    return split
