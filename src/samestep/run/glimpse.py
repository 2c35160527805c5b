"""What events.jsonl says at a glance: how a run began, its losses, its last record.

A file of many steps has hundreds of megabytes, and a folder has a thousand runs. So records of
other kinds are not parsed, and of a large file only blocks are read.
"""

import contextlib
import errno
import json
import math
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from samestep.run.records import RUN_FORMAT

_WHOLE_BYTES = 2**19
"""A file of at most this size is read whole."""
_END_BYTES, _BLOCK_BYTES, _BLOCKS = 2**16, 2**14, 24
"""Of a larger one: its first and last bytes, and blocks at even distances between them."""
_ENOUGH = 12
"""So many epochs in the blocks of a large file tell its curve; else single steps do."""


class Line(msgspec.Struct, frozen=True):
    """What is asked of a record; what is not in it has the default."""

    event: str
    time: float | None = None
    format: int = RUN_FORMAT
    recipe: str = ""
    world_size: int | None = None
    resumed: bool = False
    monitor: str | None = None
    lower_is_better: tuple[str, ...] | None = None
    epoch: int | None = None
    step: int | None = None
    loss: float | None = None
    seconds: float | None = None
    """Of a step, the seconds of training up to it."""
    train_seconds: float = 0.0
    reason: str | None = None


_DECODER = msgspec.json.Decoder(Line)
_START, _RESUME, _EPOCH, _STEP, _EVALUATION = (
    f'{{"event": "{event}", '.encode()
    for event in ("start", "resume", "epoch", "step", "evaluation")
)
_SHAPE = (_START, _RESUME, _EPOCH)


@dataclass(frozen=True, kw_only=True)
class Glimpse:
    """What events.jsonl says of one run."""

    start: Line | None = None
    """The record that it began with."""
    latest: Line | None = None
    """The `start` record of the latest attempt."""
    last: Line | None = None
    """The last whole record."""
    losses: tuple[float, ...] = ()
    """Training losses of epochs, or of steps where no epoch has ended; NaN where it is not finite.
    Of a large file some, evenly spread."""
    epochs: int = 0
    """Epochs that have ended."""
    steps: int = 0
    seconds: float | None = None
    """Of training; evaluations and checkpoints are not in it. None if it is not known."""
    size: int = 0
    """Bytes of the file."""


def glimpse(file: Path) -> Glimpse:
    """Return what a run's records say.

    Raises:
        OSError: the file cannot be read.
    """
    size, blocks = _read(file)
    kept = _uninterrupted(_decoded(blocks, _SHAPE))
    starts = [line for line in kept if line.event == "start"]
    epochs = {line.epoch: line for line in kept if line.event == "epoch"}  # a later one counts
    last, step = (_last(blocks, prefix) for prefix in (b"", _STEP))
    whole = size <= _WHOLE_BYTES
    counted = [sum(line.train_seconds for line in epochs.values())] if whole and epochs else []
    seconds = [*counted, *([step.seconds] if step and step.seconds is not None else [])]
    return Glimpse(
        start=starts[0] if starts else None,
        latest=starts[-1] if starts else None,
        last=last,
        losses=_losses(blocks, list(epochs.values()), whole=whole),
        epochs=max((number or 0 for number in epochs), default=0),
        steps=max((line.step or 0 for line in (*kept, last, step) if line), default=0),
        seconds=max(seconds, default=None),
        size=size,
    )


def validations(file: Path) -> list[dict[str, Any]]:
    """Return the evaluations of the validation set in a file that is not large; else none.

    Raises:
        OSError: the file cannot be read.
    """
    found: list[dict[str, Any]] = []
    if file.stat().st_size > _WHOLE_BYTES:
        return found
    for text in _starting_with(_read(file)[1], _EVALUATION):
        with contextlib.suppress(ValueError, RecursionError):
            found.append(json.loads(text))
    return [one for one in found if one.get("split") == "validation"]


@contextlib.contextmanager
def open_regular(file: Path) -> Iterator[int]:
    """Open a file to read; what is no file is refused rather than waited for, as a FIFO would be.

    Raises:
        OSError: it cannot be opened, or is no file.
    """
    descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no file", str(file))
        yield descriptor
    finally:
        os.close(descriptor)


def _read(file: Path) -> tuple[int, list[list[bytes]]]:
    """Return a file's size, and the whole lines of each block of it."""
    with open_regular(file) as descriptor:
        size = os.fstat(descriptor).st_size
        places = [(0, size)]
        if size > _WHOLE_BYTES:
            room = (size - 2 * _END_BYTES) / _BLOCKS
            between = [_END_BYTES + int(room * (n + 0.5)) for n in range(_BLOCKS)]
            places = [(at, _BLOCK_BYTES) for at in between]
            places = [(0, _END_BYTES), *places, (size - _END_BYTES, _END_BYTES)]
        blocks = []
        for at, length in places:
            os.lseek(descriptor, at, os.SEEK_SET)
            # What stands before the first newline began elsewhere; what follows the last is torn.
            blocks.append(os.read(descriptor, length).split(b"\n")[bool(at) : -1])
    return size, blocks


def _starting_with(blocks: list[list[bytes]], prefix: bytes | tuple[bytes, ...]) -> list[bytes]:
    return [text for lines in blocks for text in lines if text.startswith(prefix)]


def _decoded(blocks: list[list[bytes]], prefix: bytes | tuple[bytes, ...]) -> Iterator[Line]:
    found = (_line(text) for text in _starting_with(blocks, prefix))
    return (line for line in found if line is not None)


def _line(text: bytes) -> Line | None:
    """Return the record of a line, or None if it is none."""
    try:
        return _DECODER.decode(text)
    except RecursionError:
        return None
    except msgspec.MsgspecError:
        if b"NaN" not in text and b"Infinity" not in text:
            return None
    # Earlier versions wrote these, which are no JSON.
    try:
        return msgspec.convert(json.loads(text), Line)
    except (ValueError, RecursionError, msgspec.MsgspecError):
        return None


def _last(blocks: list[list[bytes]], prefix: bytes) -> Line | None:
    """Return the last record that begins so, of the last block."""
    return next((_line(text) for text in reversed(blocks[-1]) if text.startswith(prefix)), None)


def _uninterrupted(lines: Iterable[Line]) -> list[Line]:
    """Leave out what a later attempt has superseded, as `as_uninterrupted` does."""
    kept: list[Line] = []
    for line in lines:
        if line.event == "start" and not line.resumed:
            kept = []
        if line.event == "resume" and line.step is not None:
            kept = [one for one in kept if one.step is None or one.step <= line.step]
        kept.append(line)
    return kept


def _losses(blocks: list[list[bytes]], epochs: list[Line], *, whole: bool) -> tuple[float, ...]:
    """Return the losses of epochs if there are any, or, of a large file, enough; else of steps."""
    if len(epochs) < (1 if whole else _ENOUGH):
        steps = _uninterrupted(_decoded(blocks, (_START, _RESUME, _STEP)))
        by_step = {line.step: line for line in steps if line.event == "step"}
        epochs = list(by_step.values()) or epochs
    return tuple(math.nan if line.loss is None else line.loss for line in epochs)
