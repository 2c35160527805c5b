"""What a rank does to itself in a test: a signal at the n-th time that it comes to some point."""

import itertools
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Strike = Callable[[], None]


@dataclass(frozen=True)
class Fault:
    point: str
    """One of POINTS."""
    nth: int = 1
    """At which visit of the point."""
    signum: int = signal.SIGKILL
    times: int = 1
    """How often it is sent."""
    rank: int | None = 0
    """Which rank; None for all."""
    num_bytes: int = 0
    """After how much of a checkpoint, for "within the checkpoint"."""


def command_line(arguments: list[str], faults: tuple[Fault, ...]) -> None:
    """Run `samestep` with faults planted in this rank."""
    from samestep.shell.cli import main

    for fault in faults:
        if fault.rank in (None, int(os.environ.get("RANK", "0"))):
            _plant(fault)
    sys.exit(main(arguments))


def _plant(fault: Fault) -> None:
    visits = itertools.count(1)

    def strike() -> None:
        if next(visits) == fault.nth:
            for _ in range(fault.times):
                os.kill(os.getpid(), fault.signum)

    if fault.point == "within the checkpoint":
        _within_checkpoint(strike, fault.num_bytes)
    else:
        POINTS[fault.point](strike)


def _wrap(
    owner: Any,
    name: str,
    strike: Strike,
    *,
    after: bool,
    when: Callable[..., bool] = lambda *_: True,
) -> None:
    """Strike before or after those calls of a function whose arguments fit."""
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        fits = when(*args)
        if fits and not after:
            strike()
        value = original(*args, **kwargs)
        if fits and after:
            strike()
        return value

    setattr(owner, name, wrapped)


def _step(strike: Strike) -> None:
    from samestep.core.training.step import EagerStep

    _wrap(EagerStep, "__call__", strike, after=True)


def _evaluation(strike: Strike) -> None:
    from samestep.core.training import loop

    _wrap(loop, "evaluate", strike, after=False)


def _before_checkpoint(strike: Strike) -> None:
    from samestep.base.run import checkpoints

    _wrap(checkpoints, "save", strike, after=False)


def _within_copy(strike: Strike) -> None:
    """Strike at the n-th tensor that is copied for a checkpoint."""
    from samestep.base.run.host_copy import _Copying

    _wrap(_Copying, "_copy", strike, after=True)


def _shards(*, after: bool) -> Callable[[Strike], None]:
    """Strike before or after this rank has written its part of a sharded checkpoint."""

    def plant(strike: Strike) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        _wrap(FileSystemWriter, "write_data", strike, after=after)

    return plant


def _after_shards(strike: Strike) -> None:
    from samestep.base.run import shards

    _wrap(shards, "write", strike, after=True)


def _within_checkpoint(strike: Strike, num_bytes: int) -> None:
    from samestep.base.run import checkpoints

    checkpoints._SMALL = 0  # else it is written at once
    original = checkpoints._Writer.write

    def write(self: Any, data: Any) -> int:
        before = getattr(self, "num_bytes", 0)
        count = original(self, data)
        self.num_bytes = before + count
        if before <= num_bytes < before + count:
            self._file.flush()
            strike()
        return count

    checkpoints._Writer.write = write


def _sync(name: str, *, after: bool) -> Callable[[Strike], None]:
    def fits(descriptor: int) -> bool:
        return Path(f"/proc/self/fd/{descriptor}").readlink().name.endswith(name)

    return lambda strike: _wrap(os, "fsync", strike, after=after, when=fits)


def _rename(name: str, *, after: bool) -> Callable[[Strike], None]:
    def fits(_self: Path, target: Path) -> bool:
        return target.name.endswith(name)

    return lambda strike: _wrap(Path, "replace", strike, after=after, when=fits)


def _deletion(*, after: bool) -> Callable[[Strike], None]:
    def fits(path: Path) -> bool:
        return path.suffix == ".pt"

    return lambda strike: _wrap(Path, "unlink", strike, after=after, when=fits)


def _within_index(strike: Strike) -> None:
    from samestep.base.run import index
    from samestep.base.run.files import write_atomically

    def write_text(path: Path, text: str) -> None:
        def write(file: Any) -> None:
            half = len(text) // 2
            file.write(text[:half].encode())
            file.flush()
            strike()
            file.write(text[half:].encode())

        write_atomically(path, write)

    index.write_text = write_text


def _record(event: str, *, after: bool) -> Callable[[Strike], None]:
    def plant(strike: Strike) -> None:
        from samestep.base.run.directory import Run

        def fits(_run: Run, record: dict[str, Any]) -> bool:
            return event in (record["event"], record.get("split"))

        _wrap(Run, "append", strike, after=after, when=fits)

    return plant


def _within_record(strike: Strike) -> None:
    from samestep.base.run.directory import Run

    original = Run.append

    def append(self: Any, record: dict[str, Any]) -> None:
        if record["event"] == "checkpoint":
            before = self._events.seek(0, os.SEEK_END)
            original(self, record)
            whole = self._events.seek(0, os.SEEK_END)
            torn = (before + whole) // 2
            # As if the kernel had got no further: torn for the moment of the strike.
            tail = os.pread(self._events.fileno(), whole - torn, torn)
            self._events.truncate(torn)
            strike()
            self._events.write(tail)
        else:
            original(self, record)

    Run.append = append


POINTS: dict[str, Callable[[Strike], None]] = {
    "after a step": _step,
    "before an evaluation": _evaluation,
    "before the test's record": _record("test", after=False),
    "after the test's record": _record("test", after=True),
    "within the copy": _within_copy,
    "before the checkpoint": _before_checkpoint,
    "before the checkpoint's sync": _sync(".pt.tmp", after=False),
    "after the checkpoint's sync": _sync(".pt.tmp", after=True),
    "before the checkpoint's name": _rename(".pt", after=False),
    "after the checkpoint's name": _rename(".pt", after=True),
    "before the shards": _shards(after=False),
    "within the shards": _shards(after=True),
    "after the shards": _after_shards,
    "within the index": _within_index,
    "before the index's sync": _sync("index.json.tmp", after=False),
    "before the index's name": _rename("index.json", after=False),
    "after the index's name": _rename("index.json", after=True),
    "before a deletion": _deletion(after=False),
    "after a deletion": _deletion(after=True),
    "before the record": _record("checkpoint", after=False),
    "within the record": _within_record,
    "after the record": _record("checkpoint", after=True),
}
