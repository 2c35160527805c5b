"""Note what this rank does: the kind of event, the user's line, the step, and a few facts."""

import functools
import os
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

import samestep
from samestep.checking.events import Event, encode, events_path
from samestep.checking.scratch import Scratch
from samestep.script.hooks import Hooks

_OWN = str(Path(samestep.__file__).parent) + os.sep
_LIBRARIES = tuple(
    {
        *(os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib")),
        *(os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("purelib", "platlib")),
        str(Path(torch.__file__).resolve().parent.parent) + os.sep,
    }
)


class Recorder:
    """One rank's notes. The modules of `watch/` call `note`; the rules read the file afterwards."""

    def __init__(self, folder: Path, rank: int, hooks: Hooks, scratch: Scratch) -> None:
        self.rank = rank
        self.hooks = hooks
        self._folder, self._scratch = folder, scratch
        self._open()
        self._began = time.perf_counter()
        self.quiet = 0  # above 0 while a watcher itself calls PyTorch

    @property
    def evaluating(self) -> bool:
        """Whether the script is in an evaluation, as far as its calls show."""
        return self.hooks.evaluating

    def note(self, kind: str, *, where: str | None = None, **facts: Any) -> None:
        """Append an event; without `where`, at the innermost line of the user's code."""
        if self.quiet:
            return
        event = Event(
            kind=kind,
            where=self.where() if where is None else where,
            step=self.hooks.steps,
            epoch=self.hooks.epochs,
            evaluating=self.evaluating,
            time=time.perf_counter() - self._began,
            facts=facts,
        )
        os.write(self._file, encode(event))

    def become(self, rank: int, *, anew: bool = False) -> None:
        """Note from here on as another rank: with what was noted, or in a file of its own."""
        before = events_path(self._folder, self.rank)
        self.rank = rank
        if anew:
            self._open()
        else:
            before.rename(events_path(self._folder, rank))

    def _open(self) -> None:
        path = events_path(self._folder, self.rank)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Note nothing of what a watcher itself does inside, and build no graph of it."""
        self.quiet += 1
        try:
            with torch.no_grad():
                yield
        finally:
            self.quiet -= 1

    def where(self) -> str:
        """Return the innermost line of the user's code, `file.py:41`."""
        frame = self.frame()
        return "" if frame is None else f"{self._name(frame.f_code.co_filename)}:{frame.f_lineno}"

    def frame(self) -> FrameType | None:
        """Return the innermost frame of the user's code."""
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - a stack inspected at each call
        while frame is not None and not _is_users(frame.f_code.co_filename):
            frame = frame.f_back
        return frame

    def _name(self, path: str) -> str:
        return self._scratch.real(os.path.realpath(path)).removeprefix(self._scratch.home + os.sep)


@functools.cache
def _is_users(path: str) -> bool:
    whole = os.path.realpath(path)
    return not (path.startswith("<") or whole.startswith((_OWN, *_LIBRARIES)))


def checksum(tensor: Tensor) -> int | None:
    """Return a number that tells a tensor's bits from others': the sum of its bytes as integers.

    None for a tensor that has no plain memory: sparse, on the meta device.
    """
    if tensor.layout != torch.strided or tensor.device.type == "meta" or not tensor.numel():
        return None
    whole = tensor.detach().contiguous()
    by_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if whole.is_complex():
        whole = torch.view_as_real(whole).contiguous()
    kind = by_size[whole.element_size()]
    flat = whole.reshape(-1)
    bits = flat.to(torch.uint8) if flat.dtype == torch.bool else flat.view(kind)
    return int(bits.sum(dtype=torch.int64))
