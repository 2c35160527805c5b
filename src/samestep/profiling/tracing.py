"""Trace some steps with torch.profiler, and keep the trace as one whole file a rank."""

import gzip
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from samestep.errors import UserError
from samestep.profiling.measured import Operations
from samestep.profiling.trace_digest import digest
from samestep.profiling.trace_events import FLOOR, INDEX, MARK, phases_of
from samestep.run.files import write_atomically
from samestep.training.phases import Phases

_MANY_STEPS = 200
"""To read the trace of so many takes seconds in which nothing else is to be seen."""


class Tracer:
    """The profiler around some steps of this rank."""

    def __init__(self, phases: Phases) -> None:
        self._phases = phases
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        # Not with acc_events: PyTorch would make Python objects of all events, for longer than all
        # the rest takes.
        self._profile = profile(activities=activities, profile_memory=True)
        self.steps = 0
        """Steps traced so far."""
        self._running = False

    def start(self) -> None:
        """Begin to trace, and to mark the end of each phase in the trace."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()  # what was started before is in no traced step
        self._profile.start()
        with record_function(FLOOR):
            one = torch.ones(())
            for _ in range(200):
                torch.neg(one)
        self._running = True
        self._end_of_indexing = _mark_indexing()
        self._phases.observer = _mark
        _mark("other")
        self._begin_step()

    def step(self, taken: int = 1) -> None:
        """Count a step, or the steps of one graph, unless the trace has ended."""
        if self._running:
            self._step.__exit__(None, None, None)
            self.steps += taken
            self._begin_step()

    def _begin_step(self) -> None:
        # The name that readers of PyTorch's traces look for; the profiler writes it by itself only
        # where it is given a schedule.
        self._step = record_function(f"ProfilerStep#{self.steps}")
        self._step.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """End the trace, unless it has ended."""
        if self._running:
            self._step.__exit__(None, None, None)
            self._phases.observer = None
            self._end_of_indexing()
            self._profile.stop()
            self._running = False

    def keep(self, folder: Path, name: str) -> tuple[Operations, tuple[float, str] | None]:
        """Write the trace and the memory's timeline into a folder; return what they say.

        The trace is compressed, and has its phases as a row of their own.

        Raises:
            UserError: one of them could not be written; no part of it is left.
        """
        if self.steps >= _MANY_STEPS:
            sys.stderr.write(f"Reading the trace of {self.steps:,} steps.\n")
        trace = self._exported()
        events: list[dict[str, Any]] = trace["traceEvents"]
        # With a process group the profiler says it; readers that compare ranks ask for it.
        trace.setdefault("distributedInfo", {"rank": 0})
        trace["traceEvents"] = [*events, *_phase_row(events)]
        text = json.dumps(trace).encode()
        content = gzip.compress(text, compresslevel=3, mtime=0)
        write_whole(folder / f"trace_{name}.json.gz", content)
        rows = memory_timeline(events)
        lines = ["ms,phase,MiB", *(f"{ms:.3f},{phase},{mib:.4f}" for ms, phase, mib in rows)]
        write_whole(folder / f"memory_{name}.csv", "\n".join([*lines, ""]).encode())
        return digest(events, self.steps), peak_memory(rows)

    def _exported(self) -> Any:
        with tempfile.TemporaryDirectory(prefix="samestep-trace-") as folder:
            raw = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(raw))
            try:
                # The profiler writes what fits on a full disk, and does not say so.
                return json.loads(raw.read_text(encoding="utf-8", errors="replace"))
            except (OSError, ValueError) as error:
                raise UserError(
                    f"The trace could not be written to {folder}: is that disk full? Free some "
                    "space, or set TMPDIR to a directory that has some."
                ) from error


def _mark(phase: str) -> None:
    """Mark the end of a phase in the trace."""
    with record_function(MARK + phase):
        pass


def _mark_indexing() -> Callable[[], None]:
    """Mark where a tensor on the CPU is an index, until what is returned is called."""
    original: Callable[..., Any] = Tensor.__getitem__

    def getitem(tensor: Tensor, key: Any) -> Any:
        if torch.compiler.is_compiling() or not _is_index(key):
            return original(tensor, key)
        with record_function(INDEX):
            return original(tensor, key)

    Tensor.__getitem__ = getitem  # type: ignore[method-assign, assignment]

    def end() -> None:
        del Tensor.__getitem__  # the one that it inherits is there again

    return end


def _is_index(key: Any) -> bool:
    """Whether a key holds a single number of a tensor on the CPU: `x[i]`, `x[:i]`, `x[i, 0]`."""
    if isinstance(key, tuple):
        return any(map(_is_index, key))
    if isinstance(key, slice):
        return any(map(_is_index, (key.start, key.stop, key.step)))
    return isinstance(key, Tensor) and key.dim() == 0 and key.device.type == "cpu"


def write_whole(path: Path, content: bytes) -> None:
    """Write a file of a profile, whole or not at all.

    Raises:
        UserError: it could not be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: file.write(content))
    except (OSError, UserError) as error:
        raise unwritable(path, error.__cause__ or error) from error


def unwritable(path: Path, cause: BaseException | None) -> UserError:
    """Return the message for a file of a profile that could not be written."""
    reason = getattr(cause, "strerror", None) or cause
    return UserError(
        f"{path} could not be written: {reason}. Nothing of it is left; free some space or choose "
        "another directory with --run-dir (for a script: --out)."
    )


def _phase_row(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the phases as ranges on a row of their own, above all others in a viewer."""
    first = next((e for e in events if str(e.get("name", "")).startswith(MARK)), None)
    if first is None:
        return []
    row = {"pid": first["pid"], "tid": 0}
    base = {**row, "ph": "M", "ts": first["ts"]}
    named = [
        {**base, "name": "thread_name", "args": {"name": "phases of a step (samestep)"}},
        {**base, "name": "thread_sort_index", "args": {"sort_index": -1}},
    ]
    one = {**row, "ph": "X", "cat": "phase"}
    ranges = ({**one, "name": p, "ts": a, "dur": b - a} for p, (a, b) in phases_of(events))
    return [*named, *ranges]


def memory_timeline(events: list[dict[str, Any]]) -> list[tuple[float, str, float]]:
    """Return (ms since the trace began, phase, MiB) for each change of the allocated memory.

    The bytes are PyTorch's allocator's: on the GPU if there is one in the trace, else the CPU's.
    """
    changes = [e for e in events if e.get("name") == "[memory]"]
    on_device = [e for e in changes if e["args"].get("Device Type", 0) == 1]
    phases = phases_of(events)
    if not phases:
        return []
    begin, rows, place = phases[0][1][0], [], 0
    held = 0.0
    for event in sorted(on_device or changes, key=lambda e: e["ts"]):
        # "Total Allocated" is the device's; the CPU's allocator keeps no such account.
        total = event["args"].get("Total Allocated", 0) if on_device else None
        held = float(total) if total is not None else held + event["args"]["Bytes"]
        while place < len(phases) - 1 and event["ts"] >= phases[place][1][1]:
            place += 1
        if event["ts"] >= begin:
            rows.append(((event["ts"] - begin) / 1000, phases[place][0], held / 2**20))
    return rows


def peak_memory(rows: list[tuple[float, str, float]]) -> tuple[float, str] | None:
    """Return the most MiB beyond what is held between the steps, and the phase it is held in."""
    if not rows:
        return None
    _, phase, most = max(rows, key=lambda row: row[2])
    return most - min(mib for _, _, mib in rows), phase
