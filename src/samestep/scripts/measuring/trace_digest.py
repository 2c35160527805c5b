"""Read a trace: how much of what the steps compute is work, and what limits that work.

A trace is what torch.profiler exports (Chrome's format). A mark ends each phase: an event named
`samestep::forward` ends what began with the mark before it. All times are in µs; spans of time are
arrays of (begin, end), in order and without overlaps.

On the CPU, a step is split into work, the overhead of starting operations, and loops that read
numbers. The same call in the same place of each step is one repeated measurement and its median
counts, so that a step disturbed by another program does not matter. On a GPU the kernels are the
work; while none runs, it waits for the host.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from samestep.base.run.records import COMPUTE
from samestep.scripts.measuring.measured import Operations

Event = Mapping[str, Any]
Interval = tuple[float, float]
Numbers = NDArray[np.float64]
Spans = Numbers  # (number of spans, 2): begins and ends

MARK = "samestep::"
FLOOR = MARK + "floor"
"""A range of operations on one number: the cost of an operation that does no work."""
INDEX = "index by a tensor on the CPU"
"""A range in which a tensor is read as an index, as in `x[i]`; that waits for no device."""
READ = "aten::_local_scalar_dense"
"""A number is read from a tensor: `.item()`, `float()`, `int()`, `bool()`."""

COLLATE = "collate_fn of DataLoader"  # the mark that hooks set around it
_MATMUL = re.compile(
    r"mm\b|addmm|bmm|matmul|linear|conv|gemm|attention|cutlass|xmma|wgrad|dgrad|flash|einsum",
    re.IGNORECASE,
)
_COMMUNICATION = re.compile(r"nccl|gloo|all_reduce|c10d", re.IGNORECASE)
_COMPILED = re.compile(r"Torch-Compiled|CompiledF|cpp_fused|triton_", re.IGNORECASE)
"""One call for a whole graph, whose operations do not show."""
_PASSES_ON = ("autograd::", "torch::autograd", MARK)
_COLLATES = (COLLATE, "aten::stack", "aten::cat", "aten::concat", "aten::pin_memory")
_ON_GPU = ("kernel", "gpu_memset", "gpu_memcpy")
_WAITS = re.compile(r"cuda(Stream|Device|Event)Synchronize|cudaMemcpy$|hip\w+Synchronize")
_LONGEST_NAME = 40
_GENERIC = re.compile(r"kernel\d*$|^Kernel\d*$|^run$", re.IGNORECASE)
"""Names of C++ templates whose arguments say what they compute."""
_NO_FUNCTION = re.compile(r"gpu_kernel_impl\w*|ReduceOp|lambda|native|\w{1,5}|\w*_t")
_CHAIN = 25
"""At most this many calls, also nested ones, between two reads of numbers in a loop of reads."""
_DEFAULT_FLOOR_US = 2.0
_NO_WORK_FLOORS = 3
"""An operation that takes up to this many times the floor is more overhead than work."""
_ROUNDING_US = 1e-4


Split = tuple[dict[str, float], Mapping[str, float]]
"""µs per step of what the steps compute, by what limits it; and the work of each operation."""


def digest(events: Sequence[Event], steps: int) -> Operations:
    """Summarise the operations in a trace of this many steps."""
    phases = phases_of(events)
    compute = union(time for phase, time in phases if phase in COMPUTE)
    if not len(compute) or not steps:
        return Operations()
    waits = union(time for phase, time in phases if phase == "data")
    on_gpu = any(event.get("cat") in _ON_GPU for event in events)
    parts, names = (
        _split_device(events, compute, waits, steps) if on_gpu else _split_host(events, compute)
    )
    total = sum(parts.values()) or 1.0
    top: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    for name, duration in names.items():
        top[multiplies(name)][short_name(name)] += duration / total  # type: ignore[assignment]
    kernels = union(span(event) for event in events if event.get("cat") == "kernel")
    collated = common(spans_of(events, *_COLLATES), waits)
    # PyTorch itself reads optimizers' counters, loaders' seeds and indices, all on the CPU; what a
    # data set reads is not read by the step.
    others = spans_of(events, "enumerate(DataLoader)#", "aten::_fused", INDEX)
    itself = union([*others, *waits, *_of_optimizers(events)])
    reads = [e["ts"] for e in calls(events) if e["name"] == READ]
    return Operations(
        **{kind: part / total for kind, part in parts.items()},
        gpu_busy=length(kernels) / steps / 1e6 if on_gpu else None,
        count=len(_within(calls(events), compute)) / steps,
        syncs=int((find(itself, reads) < 0).sum()) / steps,
        collate=length(collated) / length(waits) if len(waits) else 0.0,
        top_matmul=tuple(top[True].most_common(5)),
        top_memory=tuple(top[False].most_common(5)),
    )


def _split_device(events: Sequence[Event], compute: Spans, waits: Spans, steps: int) -> Split:
    """Split what a GPU did; `compute` is when the host, which runs ahead, was in such a phase."""
    ran = [event for event in events if event.get("cat") in _ON_GPU]
    window = np.array([(compute[0, 0], max(compute[-1, 1], *(span(e)[1] for e in ran)))])
    computing = [event for event in ran if not _COMMUNICATION.search(event["name"])]
    arithmetic = union(span(event) for event in computing if multiplies(event["name"]))
    idle = without(window, union([*(span(event) for event in ran), *waits]))
    syncs = union(
        span(e) for e in events if e.get("cat") == "cuda_runtime" and _WAITS.match(e["name"])
    )
    # While the host waits for the device, the device runs dry, then idles until the host resumes.
    drained = length(idle[lengths_in(idle, syncs) > _ROUNDING_US])
    matmul = length(common(arithmetic, window))
    names: dict[str, float] = defaultdict(float)
    for event in computing:
        names[event["name"]] += event["dur"] / steps
    worked = length(common(union(span(e) for e in computing), window))
    parts = {"matmul": matmul, "memory": worked - matmul}
    parts |= {"sync": drained, "launch": length(idle) - drained}
    return {kind: part / steps for kind, part in parts.items()}, names


def _split_host(events: Sequence[Event], compute: Spans) -> Split:
    host = _within(calls(events), compute)
    steps = spans_of(events, "ProfilerStep#")
    steps = steps[lengths_in(steps, compute) > _ROUNDING_US]
    if not len(steps):
        steps = np.array([(compute[0, 0], compute[-1, 1])])
    begins = [event["ts"] for event in host]
    step_of = find(steps, begins)
    # What PyTorch reads for itself is not the script's to change.
    by_itself = find(union([*_of_optimizers(events), *spans_of(events, INDEX)]), begins) >= 0
    chains = common(union(_chains(host, step_of, by_itself)), compute)
    # The trace itself measures the cost of an operation that does no work.
    floors = [call["dur"] for call in _within(calls(events), spans_of(events, FLOOR))]
    least = _NO_WORK_FLOORS * (median(floors) if floors else _DEFAULT_FLOOR_US)
    work, overhead = [], []
    for (event, own), step, chain in zip(
        self_times(host), step_of, find(chains, begins), strict=True
    ):
        if chain < 0:
            beyond = max(0.0, own - least) if _works(event["name"]) else 0.0
            work.append((event["name"], int(step), beyond))
            overhead.append((event["name"], int(step), own - beyond))
    # Time in which no call ran belongs to the call that followed.
    followed = {event["ts"]: event["name"] for event in reversed(host)}
    gaps = without(without(compute, chains), union(span(event) for event in host))
    between = [
        (followed.get(end, "the end"), int(step), end - begin)
        for (begin, end), step in zip(gaps.tolist(), find(steps, gaps[:, 0]), strict=True)
    ]
    names = _per_step(work, len(steps))
    parts = {
        "matmul": sum(time for name, time in names.items() if multiplies(name)),
        "memory": sum(time for name, time in names.items() if not multiplies(name)),
        "launch": sum(sum(_per_step(part, len(steps)).values()) for part in (overhead, between)),
        "sync": float(np.median(lengths_in(steps, chains))),
    }
    return parts, names


def _chains(
    host: Sequence[Event], step_of: NDArray[np.intp], by_itself: NDArray[np.bool_]
) -> Iterator[Interval]:
    """Yield the time from one read of a number to the next, in loops that do little else."""
    before: tuple[float, int] | None = None
    between = 0
    for event, step, own in zip(host, step_of, by_itself, strict=True):
        if event["name"] != READ or own:
            between += "::" in event["name"]
            continue
        if before is not None and before[1] == step and between <= _CHAIN:
            yield before[0], event["ts"]
        before = (event["ts"], step)
        between = 0


def _per_step(pieces: Iterable[tuple[str, int, float]], num_steps: int) -> dict[str, float]:
    """Return each name's median µs per step; the n-th piece of a name is the same call in each."""
    values: dict[tuple[str, int], list[float]] = defaultdict(list)
    seen: Counter[tuple[str, int]] = Counter()
    for name, step, value in pieces:
        values[name, seen[name, step]].append(value)
        seen[name, step] += 1
    sums: dict[str, float] = defaultdict(float)
    for (name, _), same in values.items():
        sums[name] += median(same) * len(same) / num_steps
    return sums


def memory_timeline(events: Sequence[Event]) -> list[tuple[float, str, float]]:
    """Return (ms, phase, MiB) at each change of the allocated memory, of a GPU if it was traced."""
    changes = [e for e in events if e.get("name") == "[memory]"]
    on_device = [e for e in changes if e["args"].get("Device Type", 0) == 1]
    changes = sorted(on_device or changes, key=lambda e: e["ts"])
    phases = phases_of(events)
    if not phases or not changes:
        return []
    # "Total Allocated" is the device's; the CPU's allocator does not count it.
    key = "Total Allocated" if on_device else "Bytes"
    sizes = np.array([e["args"].get(key, 0) for e in changes], dtype=float)
    held = (sizes if on_device else np.cumsum(sizes)) / 2**20
    begin, ends = phases[0][1][0], [end for _, (_, end) in phases]
    moments = np.array([e["ts"] for e in changes])
    place = np.minimum(np.searchsorted(ends, moments, side="right"), len(phases) - 1)
    return [
        ((ts - begin) / 1000, phases[p][0], mib)
        for ts, p, mib in zip(moments.tolist(), place, held.tolist(), strict=True)
        if ts >= begin
    ]


def peak_memory(rows: list[tuple[float, str, float]]) -> tuple[float, str] | None:
    """Return the most MiB beyond what is held between the steps, and the phase of that moment."""
    if not rows:
        return None
    _, phase, most = max(rows, key=lambda row: row[2])
    return most - min(mib for _, _, mib in rows), phase


def short_name(name: str) -> str:
    """Return the telling part of an operation's or a kernel's name, in at most 40 characters."""
    name = name.removeprefix("aten::").removeprefix("void ").replace("(anonymous namespace)::", "")
    head, _, arguments = name.partition("<")
    short = head.split("(")[0].rpartition("::")[2].strip() or name
    if _GENERIC.search(short) and arguments:
        words = re.findall(r"[A-Za-z_]\w*(?=\s*[<,>({]|$)", arguments)
        short = next((word for word in words if not _NO_FUNCTION.fullmatch(word)), short)
    return short if len(short) <= _LONGEST_NAME else f"{short[: _LONGEST_NAME - 1]}…"


def multiplies(name: str) -> bool:
    """Whether arithmetic limits it: matrix products, convolutions, attention, compiled graphs."""
    return bool(_MATMUL.search(name) or _COMPILED.search(name))


def _works(name: str) -> bool:
    """Whether a call computes by itself: autograd's nodes, which have no `::`, only pass it on."""
    if name.startswith(_PASSES_ON) or _COMMUNICATION.search(name):
        return False
    return "::" in name or bool(_COMPILED.search(name))


def span(event: Event) -> Interval:
    """Return the begin and the end of an event."""
    return event["ts"], event["ts"] + event["dur"]


def calls(events: Iterable[Event]) -> list[Event]:
    """Return the operations that the host called, in order."""
    return sorted(
        (e for e in events if e.get("cat") == "cpu_op"), key=lambda e: (e["ts"], -e["dur"])
    )


def phases_of(events: Iterable[Event]) -> list[tuple[str, Interval]]:
    """Return the phases of a trace in order, each with its begin and end."""
    marks = sorted(
        (e["ts"], e["name"].removeprefix(MARK))
        for e in events
        if e.get("cat") == "user_annotation" and e["name"].startswith(MARK) and e["name"] != FLOOR
    )
    return [(phase, (before, now)) for (before, _), (now, phase) in pairwise(marks) if phase]


def spans_of(events: Iterable[Event], *names: str) -> Spans:
    """Return when something ran whose name begins with one of these."""
    return union(span(e) for e in events if e.get("ph") == "X" and e["name"].startswith(names))


def _of_optimizers(events: Sequence[Event]) -> Spans:
    """Return when optimizers computed by themselves, without the closures that some call."""
    inside = spans_of(events, "Optimizer.step#")
    return common(inside, union(time for phase, time in phases_of(events) if phase == "optimizer"))


def self_times(ordered: Sequence[Event]) -> list[tuple[Event, float]]:
    """Return each call with the µs that it did not spend in calls within it, on its thread."""
    own = {id(call): float(call["dur"]) for call in ordered}
    threads: dict[Any, list[Event]] = defaultdict(list)
    for call in ordered:
        stack = threads[call["pid"], call["tid"]]
        while stack and call["ts"] >= span(stack[-1])[1]:
            stack.pop()
        if stack:
            own[id(stack[-1])] -= call["dur"]
        stack.append(call)
    return [(call, max(0.0, own[id(call)])) for call in ordered]


def _within(events: Sequence[Event], spans: Spans) -> list[Event]:
    inside = find(spans, [event["ts"] for event in events]) >= 0
    return [event for event, yes in zip(events, inside, strict=True) if yes]


def union(spans: Iterable[Sequence[float] | Numbers]) -> Spans:
    """Return the same time in order, with overlapping spans merged."""
    array = np.array([*spans], dtype=float).reshape(-1, 2)
    array = array[np.argsort(array[:, 0], kind="stable")]
    ends = np.maximum.accumulate(array[:, 1])
    first = np.flatnonzero(np.append(True, array[1:, 0] >= ends[:-1])[: len(array)])
    return np.column_stack([array[first, 0], ends[np.roll(first, -1) - 1]])


def length(spans: Spans) -> float:
    """Return the total time."""
    return float((spans[:, 1] - spans[:, 0]).sum())


def find(spans: Spans, moments: ArrayLike) -> NDArray[np.intp]:
    """Return the number of the span that each moment is in, or -1."""
    moments = np.asarray(moments, dtype=float)
    place = np.searchsorted(spans[:, 0], moments, side="right") - 1
    ends = np.append(spans[:, 1], -np.inf)  # place -1 is in no span
    return np.where(moments < ends[place], place, -1)


def common(first: Spans, second: Spans, keep: np.ufunc = np.logical_and) -> Spans:
    """Return the time that is in both, or what `keep` makes of whether it is in each."""
    first, second = (spans[spans[:, 0] < spans[:, 1]] for spans in (first, second))
    edges = np.unique(np.concatenate([first.ravel(), second.ravel()]))
    is_kept = keep(find(first, edges[:-1]) >= 0, find(second, edges[:-1]) >= 0)
    return np.asarray(np.column_stack([edges[:-1], edges[1:]])[is_kept])


def without(spans: Spans, taken: Spans) -> Spans:
    """Return the time in some spans that others do not cover."""
    return common(spans, taken, np.greater)


def lengths_in(windows: Spans, spans: Spans) -> Numbers:
    """Return the length of each window that the spans cover."""
    sums = np.append(0.0, np.cumsum(spans[:, 1] - spans[:, 0]))

    def covered(moments: Numbers) -> Numbers:
        """Return the length of the spans before each moment."""
        begun = np.searchsorted(spans[:, 0], moments, side="right")
        ends = np.append(-np.inf, spans[:, 1])
        return np.asarray(sums[begun] - np.maximum(0.0, ends[begun] - moments))

    return np.asarray(covered(windows[:, 1]) - covered(windows[:, 0]))
