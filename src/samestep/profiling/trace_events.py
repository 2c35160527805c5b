"""The events of a trace: which phase they lie in, which of them is which kind of work.

A trace is what `torch.profiler` exports (Chrome's format), with a mark at the end of each phase:
an event named `samestep::forward` ends what began with the mark before it.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from samestep.profiling.intervals import Interval, common, union

Event = Mapping[str, Any]
MARK = "samestep::"
FLOOR = MARK + "floor"
"""A range with operations on a single number: what an operation costs that does no work."""
COLLATE = "collate_fn of DataLoader"
"""A range in which a script's loader puts samples together, where it does so itself."""
INDEX = "index by a tensor on the CPU"
"""A range in which a tensor is read as an index, as in `x[i]`: no device is waited for."""
READ = "aten::_local_scalar_dense"
"""A number is read from a tensor: `.item()`, `float()`, `int()`, `bool()`."""

_MATMUL = re.compile(
    r"mm\b|addmm|bmm|matmul|linear|conv|gemm|attention|cutlass|xmma|wgrad|dgrad|flash|einsum",
    re.IGNORECASE,
)
_COMMUNICATION = re.compile(r"nccl|gloo|all_reduce|c10d", re.IGNORECASE)
_COMPILED = re.compile(r"Torch-Compiled|CompiledF|cpp_fused|triton_", re.IGNORECASE)
"""One call for a whole graph: what is in it cannot be told apart, and it is there to compute."""
_PASSES_ON = ("autograd::", "torch::autograd", MARK)


_LONGEST_NAME = 40
_GENERIC = re.compile(r"kernel\d*$|^Kernel\d*$|^run$", re.IGNORECASE)
"""Names of templates that say nothing: what they compute is among their arguments."""
_NO_FUNCTION = re.compile(r"gpu_kernel_impl\w*|ReduceOp|lambda|native|\w{1,5}|\w*_t")


def short_name(name: str) -> str:
    """Return the telling part of an operation's or a kernel's name, in at most 40 characters.

    What a C++ name begins with are its return type and its namespaces; where the name itself is one
    of a template for many operations, the operation is the first function among its arguments.
    """
    name = name.removeprefix("aten::").removeprefix("void ").replace("(anonymous namespace)::", "")
    head, _, arguments = name.partition("<")
    short = head.split("(")[0].rpartition("::")[2].strip()
    if _GENERIC.search(short) and arguments:
        words = re.findall(r"[A-Za-z_]\w*(?=\s*[<,>({]|$)", arguments)
        short = next((word for word in words if not _NO_FUNCTION.fullmatch(word)), short)
    if len(short) > _LONGEST_NAME:
        short = f"{short[: _LONGEST_NAME - 1]}…"
    return short or name[:_LONGEST_NAME]


def communicates(name: str) -> bool:
    """Whether a call or a kernel exchanges numbers between ranks."""
    return bool(_COMMUNICATION.search(name))


def multiplies(name: str) -> bool:
    """Whether arithmetic limits it: matrix products, convolutions, attention, compiled graphs."""
    return bool(_MATMUL.search(name) or _COMPILED.search(name))


def works(name: str) -> bool:
    """Whether a call computes by itself: autograd's nodes, which have no `::`, pass it on."""
    if name.startswith(_PASSES_ON) or communicates(name):
        return False
    return "::" in name or bool(_COMPILED.search(name))


def span(event: Event) -> Interval:
    """Return the begin and the end of an event, in µs."""
    return event["ts"], event["ts"] + event["dur"]


def calls(events: Iterable[Event]) -> list[Event]:
    """Return the operations that the host called, in order."""
    return sorted(
        (e for e in events if e.get("cat") == "cpu_op"), key=lambda e: (e["ts"], -e["dur"])
    )


def phases_of(events: Iterable[Event]) -> list[tuple[str, Interval]]:
    """Return the phases of a trace in order, each with its begin and end in µs."""
    marks = sorted(
        (e["ts"], e["name"].removeprefix(MARK))
        for e in events
        if e.get("cat") == "user_annotation" and e["name"].startswith(MARK) and e["name"] != FLOOR
    )
    return [(phase, (before, now)) for (before, _), (now, phase) in pairwise(marks) if phase]


def spans_of(events: Iterable[Event], *names: str) -> list[Interval]:
    """Return when something ran whose name begins with one of these."""
    return union(span(e) for e in events if e.get("ph") == "X" and e["name"].startswith(names))


def of_optimizers(events: Sequence[Event]) -> list[Interval]:
    """Return when optimizers computed by themselves, without the closures that some call."""
    inside = spans_of(events, "Optimizer.step#")
    return common(inside, [time for phase, time in phases_of(events) if phase == "optimizer"])


class IntervalIndex:
    """Find the one of some intervals that a moment lies in; they are in order, none overlaps."""

    def __init__(self, spans: Sequence[Interval]) -> None:
        self._spans, self._begins = spans, [begin for begin, _ in spans]

    def of(self, moment: float) -> int:
        """Return the number of the interval, or -1."""
        place = bisect_right(self._begins, moment) - 1
        return place if place >= 0 and moment < self._spans[place][1] else -1

    def among(self, events: Iterable[Event]) -> list[Event]:
        """Return the events that began in one of the intervals."""
        return [event for event in events if self.of(event["ts"]) >= 0]


def own_times(ordered: Sequence[Event]) -> list[tuple[Event, float]]:
    """Return each call with the µs that it did not spend in calls within it, on its thread."""
    own = {id(call): float(call["dur"]) for call in ordered}
    threads: dict[Any, list[Event]] = {}
    for call in ordered:
        stack = threads.setdefault((call["pid"], call["tid"]), [])
        while stack and call["ts"] >= span(stack[-1])[1]:
            stack.pop()
        if stack:
            own[id(stack[-1])] -= call["dur"]
        stack.append(call)
    return [(call, max(0.0, own[id(call)])) for call in ordered]
