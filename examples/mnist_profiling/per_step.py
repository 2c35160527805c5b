"""Print what traces of single_gpu_train.py say about one step, so that they can be compared.

    python per_step.py trace_single_gpu_workers_*.json

A trace's totals grow with the number of steps it covers, so divide by it before you compare.
"""

import json
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WAIT = "waiting for data"
# Part of a step → how the names of its events begin; single_gpu_train.py and PyTorch give them.
PARTS = {
    WAIT: "enumerate(DataLoader)#",
    "to device": "to device",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "Optimizer.",
}
STEP = "Optimizer.step#"  # exactly one per step


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What one trace holds, in seconds."""

    name: str
    steps: int
    batch_size: int
    wall: float
    """From the first wait for a batch to the end of the last optimizer step."""
    parts: dict[str, float]
    gpu: float | None
    """Seconds in which the GPU computed; None if there was no GPU."""


def read_trace(path: Path) -> Trace:
    """Add up a trace's named parts.

    Raises:
        ValueError: this is not a trace of single_gpu_train.py.
    """
    try:
        content = json.loads(path.read_bytes())
        events = content["traceEvents"]
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not a whole Chrome trace: {error}.") from error
    # The GPU's row repeats the annotations of the CPU, in another category.
    named = [e for e in events if e.get("ph") == "X" and e.get("cat") == "user_annotation"]
    spans = {
        part: [(e["ts"], e["dur"]) for e in named if e["name"].startswith(prefix)]
        for part, prefix in PARTS.items()
    }
    ends = [e["ts"] + e["dur"] for e in named if e["name"].startswith(STEP)]
    if not ends or not spans[WAIT]:
        raise ValueError(f"{path} has no training step of single_gpu_train.py in it.")
    number = re.search(r"workers_(\d+)", path.name)
    return Trace(
        name=number[1] if number else path.name,
        steps=len(ends),
        batch_size=content.get("batch_size", 0),
        wall=(max(ends) - min(start for start, _ in spans[WAIT])) / 1e6,
        parts={part: sum(length for _, length in found) / 1e6 for part, found in spans.items()},
        gpu=busy_seconds(events),
    )


def busy_seconds(events: Iterable[dict[str, Any]]) -> float | None:
    """Return the time in which at least one kernel or copy ran on the GPU."""
    categories = ("kernel", "gpu_memcpy", "gpu_memset")
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in categories)
    if not spans:
        return None
    total, until = 0.0, spans[0][0]
    for start, end in spans:
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total / 1e6


def table(traces: list[Trace]) -> list[str]:
    """Return the lines of the table, one column per trace: totals in seconds, then one step."""
    rows: list[tuple[str, list[str]]] = [
        ("workers", [trace.name for trace in traces]),
        ("steps in the trace", [f"{trace.steps:,}" for trace in traces]),
        ("total, s", []),
        (f"  {WAIT}", [f"{trace.parts[WAIT]:.2f}" for trace in traces]),
        ("  wall clock", [f"{trace.wall:.2f}" for trace in traces]),
        ("per step, ms", []),
    ]
    rows += [(f"  {p}", [_per_step(trace, trace.parts[p]) for trace in traces]) for p in PARTS]
    other = [_per_step(trace, trace.wall - sum(trace.parts.values())) for trace in traces]
    rows += [("  other", other), ("  wall clock", [_per_step(t, t.wall) for t in traces])]
    if any(trace.gpu is not None for trace in traces):
        busy = [_per_step(trace, trace.gpu) if trace.gpu is not None else "-" for trace in traces]
        rows.append(("  GPU busy", busy))
    return [f"{name:<20}" + "".join(f"{cell:>11}" for cell in cells) for name, cells in rows]


def _per_step(trace: Trace, seconds: float) -> str:
    return f"{1000 * seconds / trace.steps:.3f}"


def comparison(first: Trace, other: Trace) -> list[str]:
    """Return the speed-up for equal work, and the one that the totals would wrongly claim."""
    waits, walls = first.parts[WAIT] / other.parts[WAIT], first.wall / other.wall
    unit, work = "step", other.steps / first.steps
    if 0 < first.batch_size != other.batch_size > 0:  # then a step is not the same work
        unit, work = "image", work * other.batch_size / first.batch_size
    lines = [
        f"{other.name} workers against {first.name}, per {unit}:",
        f"  waiting for data {waits * work:.2f} x as fast, the whole {unit} {walls * work:.2f} x",
    ]
    if work != 1:
        there, here = (f"{t.steps:,} steps of {t.batch_size} images" for t in (first, other))
        lines += [
            f"  The totals say {waits:.2f} x and {walls:.2f} x, but compare different work:",
            f"  {there} with {here}.",
        ]
    return lines


def main() -> None:
    """Read the traces and print."""
    paths = [Path(name) for name in sys.argv[1:]]
    if not paths or any(name in ("-h", "--help") for name in sys.argv[1:]):
        print((__doc__ or "").strip())
        sys.exit(0 if paths else 2)
    try:
        traces = [read_trace(path) for path in paths]
    except ValueError as error:
        print(f"per_step.py: {error}", file=sys.stderr)
        sys.exit(2)
    print("\n".join(table(traces)))
    for other in traces[1:]:
        print("\n".join(comparison(traces[0], other)))


if __name__ == "__main__":
    main()
