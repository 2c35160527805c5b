"""Read a trace: how much of what the steps compute is work, and of which kind.

A trace is what `torch.profiler` exports (Chrome's format), with a mark at the end of each phase:
an event named `samestep::forward` ends what began with the mark before it.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from samestep.profiling.intervals import Interval, common, length, union
from samestep.profiling.measured import COMPUTE, Operations

Event = Mapping[str, Any]
MARK = "samestep::"
FLOOR = MARK + "floor"
"""A range with operations on a single number: what an operation costs that does no work."""
DATA = ("data",)

_MATMUL = re.compile(
    r"mm\b|addmm|bmm|matmul|linear|conv|gemm|attention|cutlass|xmma|wgrad|dgrad|sgemm|flash|einsum",
    re.IGNORECASE,
)
_COMMUNICATION = re.compile(r"nccl|gloo|all_reduce|c10d", re.IGNORECASE)
_SYNC = "aten::_local_scalar_dense"
_READS_ITSELF = ("Optimizer.step#", "enumerate(DataLoader)#", "aten::_fused")
_DEVICE_SYNC = re.compile(r"cuda(Stream|Device|Event)Synchronize|cudaMemcpy$")
_COLLATE = re.compile(r"aten::(stack|cat|concat|_to_copy|lift_fresh|pin_memory)")
_NO_WORK = ("autograd::", "torch::", MARK, "Optimizer.", "DistributedDataParallel")
_DEFAULT_FLOOR_US = 2.0
_NO_WORK_FLOORS = 3
"""Up to so many times that, an operation still is more overhead than work."""


def phases_of(events: Iterable[Event]) -> list[tuple[str, Interval]]:
    """Return the phases of a trace in order, each with its begin and end in µs."""
    marks = sorted(
        (e["ts"], e["name"].removeprefix(MARK))
        for e in events
        if e.get("ph") == "X" and e["name"].startswith(MARK) and e["name"] != FLOOR
        and e.get("cat") == "user_annotation"
    )  # fmt: skip
    return [(phase, (before, now)) for (before, _), (now, phase) in pairwise(marks) if phase]


def digest(events: Sequence[Event], steps: int) -> Operations:
    """Return what the operations of a trace of so many steps were."""
    phases = phases_of(events)
    compute = union(span for phase, span in phases if phase in COMPUTE)
    if not compute or not steps:
        return Operations()
    waits = union(span for phase, span in phases if phase in DATA)
    host = _Where(compute).among(e for e in events if e.get("cat") == "cpu_op")
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memset", "gpu_memcpy")]
    found = _on_device(events, kernels, compute, waits) if kernels else _on_host(host, events)
    whole = sum(found[kind] for kind in ("launch", "matmul", "memory", "sync")) or 1.0
    names: dict[str, float] = defaultdict(float)
    for name, duration in found["names"].items():
        names[_short(name)] += duration / whole
    return Operations(
        launch=found["launch"] / whole,
        matmul=found["matmul"] / whole,
        memory=found["memory"] / whole,
        sync=found["sync"] / whole,
        count=len(host) / steps,
        syncs=_count_syncs(events) / steps,
        collate=_collate_share(events, waits),
        top=tuple(sorted(names.items(), key=lambda item: -item[1])[:5]),
    )


class _Where:
    """Find the one of some intervals that a moment lies in; they are in order, none overlaps."""

    def __init__(self, spans: Sequence[Interval]) -> None:
        self._spans, self._begins = spans, [begin for begin, _ in spans]

    def of(self, moment: float) -> int:
        """Return the number of the interval, or -1."""
        place = bisect_right(self._begins, moment) - 1
        return place if place >= 0 and moment < self._spans[place][1] else -1

    def among(self, events: Iterable[Event]) -> Sequence[Event]:
        """Return the events that began in one of the intervals."""
        return [e for e in events if self.of(e["ts"]) >= 0]


def _on_host(host: Sequence[Event], events: Sequence[Event]) -> dict[str, Any]:
    """Split what is computed on the CPU, in µs a step.

    An operation's work is what it takes beyond one on a single number. The same operation in the
    same place of each step is one measurement repeated: the median is what counts, so that the
    steps in which another program had the core do not.
    """
    steps = [
        (e["ts"], e["ts"] + e["dur"])
        for e in sorted(events, key=lambda e: float(e.get("ts", 0)))
        if str(e.get("name")).startswith("ProfilerStep#")
    ]
    compute = union(span for phase, span in phases_of(events) if phase in COMPUTE)
    lengths = [length(common(compute, [step])) for step in steps] or [length(compute)]
    lengths = [one for one in lengths if one > 0]
    where = _Where(steps)
    least = _NO_WORK_FLOORS * _floor(events)
    repeated: dict[tuple[str, int], list[float]] = defaultdict(list)
    seen: dict[tuple[str, int], int] = defaultdict(int)
    for event, own in own_times(host):
        name = event["name"]
        if not name.startswith(_NO_WORK) and not _COMMUNICATION.search(name):
            step = where.of(event["ts"])
            repeated[name, seen[name, step]].append(max(0.0, own - least))
            seen[name, step] += 1
    names: dict[str, float] = defaultdict(float)
    for (name, _), beyond in repeated.items():
        names[name] += median(beyond) * len(beyond) / len(lengths)
    matmul = sum(us for name, us in names.items() if _MATMUL.search(name))
    memory = sum(names.values()) - matmul
    launch = max(0.0, median(lengths) - matmul - memory)
    return {"matmul": matmul, "memory": memory, "launch": launch, "sync": 0.0, "names": names}


def own_times(calls: Sequence[Event]) -> list[tuple[Event, float]]:
    """Return each call with the µs that it did not spend in calls within it, on its thread."""
    ordered = sorted(calls, key=lambda e: (e["ts"], -e["dur"]))
    own = {id(call): float(call["dur"]) for call in ordered}
    threads: dict[Any, list[Event]] = {}
    for call in ordered:
        stack = threads.setdefault((call["pid"], call["tid"]), [])
        while stack and call["ts"] >= stack[-1]["ts"] + stack[-1]["dur"]:
            stack.pop()
        if stack:
            own[id(stack[-1])] -= call["dur"]
        stack.append(call)
    return [(call, max(0.0, own[id(call)])) for call in ordered]


def _count_syncs(events: Sequence[Event]) -> int:
    """Count the numbers read from tensors, without those that PyTorch reads for itself.

    Optimizers read their counters and loaders their seeds; all of these lie on the CPU.
    """
    itself = _Where(union(
        (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e.get("ph") == "X" and e["name"].startswith(_READS_ITSELF)
    ))  # fmt: skip
    reads = [e for e in events if e.get("cat") == "cpu_op" and e["name"] == _SYNC]
    return len(reads) - len(itself.among(reads))


def _floor(events: Sequence[Event]) -> float:
    """Return the µs of an operation that does no work, as the trace itself has measured it."""
    ranges = union((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("name") == FLOOR)
    calls = _Where(ranges).among(e for e in events if e.get("cat") == "cpu_op")
    return median(call["dur"] for call in calls) if calls else _DEFAULT_FLOOR_US


def _on_device(
    events: Sequence[Event],
    kernels: Sequence[Event],
    compute: list[Interval],
    waits: list[Interval],
) -> dict[str, Any]:
    """Split what a GPU computes: its kernels are work, and where none runs it waits for the host.

    If the host meanwhile waits for the device, or has just done so, it is a sync that costs.
    """
    work: dict[str, list[Interval]] = {"matmul": [], "memory": [], "communication": []}
    names: dict[str, float] = defaultdict(float)
    for event in kernels:
        span = (event["ts"], event["ts"] + event["dur"])
        name = event["name"]
        if _COMMUNICATION.search(name):
            work["communication"].append(span)
            continue
        work["matmul" if _MATMUL.search(name) else "memory"].append(span)
        names[name] += event["dur"]
    # Marks are made by the host, which runs ahead: what the device does is looked at as a whole.
    begin, end = compute[0][0], max(compute[-1][1], *(e["ts"] + e["dur"] for e in kernels))
    window = [(begin, end)]
    matmul = length(common(union(work["matmul"]), window))
    busy = length(common(union([*work["matmul"], *work["memory"]]), window))
    covered = union([*work["matmul"], *work["memory"], *work["communication"]])
    idle = _gaps(covered, window[0])
    idle = _without(idle, waits)
    syncs = [
        (e["ts"], e["ts"] + 2 * e["dur"])  # after it the host must first catch up again
        for e in events
        if e.get("cat") == "cuda_runtime" and _DEVICE_SYNC.search(e["name"])
    ]
    synced = length(common(idle, union(syncs)))
    return {"matmul": matmul, "memory": busy - matmul, "sync": synced,
            "launch": length(idle) - synced, "names": names}  # fmt: skip


def _without(spans: list[Interval], taken: list[Interval]) -> list[Interval]:
    """Return what of some intervals others do not cover."""
    return [gap for span in spans for gap in _gaps(common(taken, [span]), span)]


def _gaps(covered: list[Interval], window: Interval) -> list[Interval]:
    """Return what of a window no interval covers."""
    edges = [window[0], *(edge for span in covered for edge in span), window[1]]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


def _collate_share(events: Sequence[Event], waits: list[Interval]) -> float:
    """Return the share of the wait for data in which samples were put together to a batch."""
    if not waits:
        return 0.0
    spans = union(
        (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e.get("cat") == "cpu_op" and _COLLATE.match(e["name"])
    )
    return length(common(spans, waits)) / (length(waits) or 1.0)


def _short(name: str) -> str:
    return name.removeprefix("aten::").split("(")[0].split("<")[0][-40:]
