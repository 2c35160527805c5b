"""Note what this rank does: events, each with the user's line and the step."""

import functools
import json
import os
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

import samestep
from samestep.base.errors import is_users, raised_at, users_frame
from samestep.base.trees import own_part, real_parts
from samestep.launch.stall.pulse import Pulse
from samestep.scripts.checking import events as ev
from samestep.scripts.checking.ranks_of_script import Job
from samestep.scripts.checking.scratch import Scratch
from samestep.scripts.checking.seen import events_path
from samestep.scripts.hooks import Hooks

_OWN = str(Path(samestep.__file__).parent) + os.sep
_VALUES_OF_A_ROW, GATHERED_VALUES = 1024, 1 << 20
_real_path = functools.cache(os.path.realpath)


class Recorder:
    """One rank's notes. The modules of `watch/` call `note`; the rules read the file afterwards."""

    def __init__(self, job: Job, rank: int, hooks: Hooks, scratch: Scratch) -> None:
        self.job, self.hooks, self._scratch = job, hooks, scratch
        self.rank = rank
        self.world_size = 1
        self._folder = Path(job.folder)
        path = events_path(self._folder, rank)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.pulse = Pulse(self._folder, rank)
        self._noted: set[tuple[str, bytes]] = set()
        self._began = time.perf_counter()
        self.quiet, self._watcher = 0, 0  # how deep watchers call PyTorch themselves; their thread
        self.is_cut = False  # whether an epoch ended earlier than its data
        self.is_ended = False  # whether the script was ended before its own end
        self.gathered: deque[Tensor] = deque(maxlen=4)
        """The last matrices that this rank has given to a gather."""
        self.evaluated: Any = None  # its last pass over a loader in an evaluation
        self.at_end: list[Callable[[int], None]] = []
        """Called with the world size when the script has ended."""

    def note(self, event: ev.Event, *, where: str | None = None) -> None:
        """Append an event; without `where`, at the innermost line of the user's code."""
        if self.quiet and self._watcher == threading.get_ident():
            return
        self.pulse.alive()
        event.where = self.where() if where is None else where
        event.step, event.epoch = self.hooks.steps, self.hooks.epochs
        event.evaluating = self.hooks.evaluating
        event.time = time.perf_counter() - self._began
        os.write(self._file, _encode(event))

    def once(self, event: ev.Event) -> None:
        """Append an event of a line of the user's, if it is new."""
        where = self.where()
        key = (where, _encode(event))
        if where and key not in self._noted:
            self._noted.add(key)
            self.note(event, where=where)

    def become(self, rank: int, world_size: int) -> None:
        """Note from here on as a rank, with what was noted before."""
        events_path(self._folder, self.rank).rename(events_path(self._folder, rank))
        self.pulse.become(self._folder, rank)
        self.rank, self.world_size = rank, world_size

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Note nothing of what a watcher itself does inside, and build no graph of it."""
        self.quiet, self._watcher = self.quiet + 1, threading.get_ident()
        try:
            with torch.no_grad():
                yield
        finally:
            self.quiet -= 1

    def where(self) -> str:
        """Return the innermost line of the user's code, `file.py:41`."""
        frame = users_frame(sys._getframe(1))  # noqa: SLF001 - a stack inspected at each call
        return "" if frame is None else f"{self.name(frame.f_code.co_filename)}:{frame.f_lineno}"

    def where_of(self, code: CodeType) -> str:
        """Return the line at which a function of the user's code begins; empty for others'."""
        name = code.co_filename
        return f"{self.name(name)}:{code.co_firstlineno}" if is_users(name) else ""

    def is_direct(self, *packages: str) -> bool:
        """Whether the user's code itself makes this call, perhaps through these packages."""
        for frame in frames():
            package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
            if not frame.f_code.co_filename.startswith(_OWN) and package not in packages:
                return is_users(frame.f_code.co_filename)
        return False

    def raised_at(self, error: BaseException) -> str:
        """Return the innermost line of the user's code that an exception has passed."""
        file, _, line = raised_at(error).removeprefix(" at ").rpartition(":")
        return f"{self.name(file)}:{line}" if file else ""

    def name(self, path: str | bytes | os.PathLike[Any]) -> str:
        """Return a file's path as its user knows it: in the project, relative to that."""
        # A relative path is another file in another folder.
        real = _real_path(os.path.abspath(os.fsdecode(path)))  # noqa: PTH100 - bytes, too
        return self._scratch.real(real).removeprefix(self._scratch.home + os.sep)


def _encode(event: ev.Event) -> bytes:
    """Return an event as a line; what JSON does not know becomes its text."""
    try:
        return msgspec.json.encode(event) + b"\n"
    except (TypeError, ValueError, OverflowError):
        fields = {"kind": type(event).__name__} | msgspec.structs.asdict(event)
        return json.dumps(fields, default=str).encode() + b"\n"


def frames() -> Iterator[FrameType]:
    """Yield the frames of the stack, from the caller's outwards."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - a stack inspected at each call
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_tracing() -> bool:
    """Whether tensors are stand-ins: `torch.jit` is tracing, or within `vmap`, `grad` or fakes."""
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)  # noqa: SLF001
    return bool(torch._C._is_tracing() or torch._C._functorch.peek_interpreter_stack() or fake)  # noqa: SLF001


def checksum(tensor: Tensor) -> int | None:
    """Return a number that tells a tensor's bits from others'; of a sharded one, of its own part.

    None for a tensor that has no plain memory: sparse, on the meta device. A plain sum would not
    do: updates that cancel, as of a bias of two classes, leave it as it was.
    """
    tensor = own_part(tensor)
    if is_lazy(tensor) or tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
        return None
    return zlib.crc32(_bytes(tensor.detach()))


def row_hashes(tensor: Tensor, most: int = 64) -> list[int]:
    """Return a number for each of a batch's first rows, to tell samples apart by their content."""
    plain = tensor.layout == torch.strided and not tensor.is_meta
    if tensor.ndim == 0 or not plain or not tensor.numel():
        return []
    rows = tensor.detach()[:most].flatten(1) if tensor.ndim > 1 else tensor.detach()[:most, None]
    rows = rows[:, :: 1 + rows.shape[1] // _VALUES_OF_A_ROW]
    whole = _bytes(rows)
    size = len(whole) // len(rows)
    return [zlib.crc32(whole[at : at + size]) for at in range(0, len(whole), size)]


def _bytes(tensor: Tensor) -> memoryview:
    plain = real_parts(tensor).cpu().contiguous().reshape(-1).view(torch.uint8)
    # What NumPy shares can no longer be resized, as FSDP does it.
    return plain.clone().numpy().data
