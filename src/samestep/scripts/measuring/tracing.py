"""Trace some steps with torch.profiler, and keep the trace as one file per rank."""

import gzip
import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from samestep.base.errors import UserError
from samestep.base.phases import Phases
from samestep.base.run.files import write_atomically
from samestep.scripts.measuring import trace_digest
from samestep.scripts.measuring.measured import Operations

_MANY_STEPS = 200  # reading a trace of this many steps takes seconds, which the user should know


class Tracer:
    """The profiler around some steps of this rank."""

    def __init__(
        self, phases: Phases, *, record_shapes: bool = False, with_stack: bool = False
    ) -> None:
        self._phases = phases
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        # Not with acc_events: making Python objects of all events takes longer than all the rest.
        self._profile = profile(
            activities=activities,
            profile_memory=True,
            record_shapes=record_shapes,
            with_stack=with_stack,
        )
        self.steps = 0  # steps traced so far
        self._running = False

    def start(self) -> None:
        """Begin to trace, and to mark the end of each phase in the trace."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()  # earlier work does not belong to a traced step
        with warnings.catch_warnings():
            # There is one cycle: no event of it is cleared.
            warnings.filterwarnings("ignore", message=".*Profiler clears events")
            self._profile.start()
        with record_function(trace_digest.FLOOR):
            number = torch.ones(())
            for _ in range(200):
                torch.neg(number)
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
        # Readers of traces look for this name; the profiler writes it only with a schedule.
        self._step = record_function(f"ProfilerStep#{self.steps}")
        self._step.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """End the trace, unless it has ended."""
        if self._running:
            self._running = False  # also if the profiler raises, as where another one has begun
            self._step.__exit__(None, None, None)
            self._phases.observer = None
            self._end_of_indexing()
            self._profile.stop()

    def keep(self, folder: Path, name: str) -> tuple[Operations, tuple[float, str] | None]:
        """Write the trace, compressed, and the memory's timeline; return what they say."""
        if self.steps >= _MANY_STEPS:
            sys.stderr.write(f"Reading the trace of {self.steps:,} steps.\n")
        trace = self._exported()
        events: list[dict[str, Any]] = trace["traceEvents"]
        # Tools that compare ranks ask for it; the profiler writes it only with a process group.
        trace.setdefault("distributedInfo", {"rank": 0})
        trace["traceEvents"] = [*events, *_phase_row(events)]
        content = gzip.compress(json.dumps(trace).encode(), compresslevel=3, mtime=0)
        write_whole(folder / f"trace_{name}.json.gz", content)
        rows = trace_digest.memory_timeline(events)
        lines = ["ms,phase,MiB", *(f"{ms:.3f},{phase},{mib:.4f}" for ms, phase, mib in rows)]
        write_whole(folder / f"memory_{name}.csv", "\n".join([*lines, ""]).encode())
        return trace_digest.digest(events, self.steps), trace_digest.peak_memory(rows)

    def _exported(self) -> Any:
        with tempfile.TemporaryDirectory(prefix="samestep-trace-") as folder:
            raw = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(raw))
            try:
                # On a full disk, the profiler writes a part and raises nothing.
                return json.loads(raw.read_text(encoding="utf-8", errors="replace"))
            except (OSError, ValueError) as error:
                raise UserError(
                    f"The trace could not be written to {folder}: is that disk full? Free some "
                    "space, or set TMPDIR to a directory on another disk."
                ) from error


def _mark(phase: str) -> None:
    with record_function(trace_digest.MARK + phase):
        pass


def _mark_indexing() -> Callable[[], None]:
    """Mark each use of a CPU tensor as an index; return a function that ends this."""
    original: Callable[..., Any] = Tensor.__getitem__

    def getitem(tensor: Tensor, key: Any) -> Any:
        if torch.compiler.is_compiling() or not _is_index(key):
            return original(tensor, key)
        with record_function(trace_digest.INDEX):
            return original(tensor, key)

    Tensor.__getitem__ = getitem  # type: ignore[method-assign, assignment]
    return partial(delattr, Tensor, "__getitem__")  # uncovers the inherited one


def _is_index(key: Any) -> bool:
    """Whether a key holds a single number of a tensor on the CPU: `x[i]`, `x[:i]`, `x[i, 0]`."""
    if isinstance(key, tuple):
        return any(map(_is_index, key))
    if isinstance(key, slice):
        return any(map(_is_index, (key.start, key.stop, key.step)))
    return isinstance(key, Tensor) and key.dim() == 0 and key.device.type == "cpu"


def _phase_row(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the phases as ranges on a row of their own, above all others in a viewer."""
    first = next((e for e in events if str(e.get("name", "")).startswith(trace_digest.MARK)), None)
    if first is None:
        return []
    row = {"pid": first["pid"], "tid": 0}
    base = {**row, "ph": "M", "ts": first["ts"]}
    return [
        {**base, "name": "thread_name", "args": {"name": "phases of a step (samestep)"}},
        {**base, "name": "thread_sort_index", "args": {"sort_index": -1}},
        *(
            {**row, "ph": "X", "cat": "phase", "name": phase, "ts": begin, "dur": end - begin}
            for phase, (begin, end) in trace_digest.phases_of(events)
        ),
    ]


def write_whole(path: Path, content: bytes) -> None:
    """Write a file of a profile, whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: file.write(content))
    except (OSError, UserError) as error:
        raise unwritable(path, error.__cause__ or error) from error


def unwritable(path: Path, cause: BaseException | None) -> UserError:
    """Return the error for a file of a profile that could not be written."""
    reason = getattr(cause, "strerror", None) or cause
    return UserError(
        f"{path} could not be written: {reason}. It was removed; free some space or choose another "
        "directory with --run-dir (for a script: --out)."
    )
