"""A rank's pulse: a small file that says what the rank does, for other processes to read.

The file is mapped into memory: a write costs about a microsecond and no system call, and outlives a
SIGKILL. Readers take no lock. A stall is judged only after nothing was written for a long time, so
a text read while it is written does no harm.
"""

import faulthandler
import functools
import itertools
import mmap
import os
import signal
import struct
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from samestep.base.errors import is_users

PULSE, STACKS = "pulse-rank-{rank}", "stacks-rank-{rank}.txt"

DUMP_SIGNAL = signal.SIGRTMIN + 9 if sys.platform == "linux" else signal.SIGUSR2
"""Lets a rank and its forked children write where their threads stand. Nothing else uses it."""

WORLD, NO_GROUP, PEER = "", "-", "peer:"
"""The group of a collective of all ranks; of what waits for no rank; and, before its number, of
what waits for one."""

RAISED, UNKNOWN = "raised", "wait"
"""The state of a call that has raised; the kind of a wait for an unknown cause."""

TIMED_OUT = "timed out"
"""What a rank does that has waited in vain: another one hangs."""


# It is made twice per collective: a frozen dataclass would take ten times as long.
class Visit(NamedTuple):
    """One call that may wait: a collective, a backward, a wait for data."""

    kind: str
    """Such as `all_reduce`."""
    detail: str = ""
    """What must be alike on all ranks, as text: type, shape, operation, source."""
    where: str = ""
    """The user's line, as FILE:LINE."""
    group: str = NO_GROUP
    """Who meets there: `WORLD`, or a name and the ranks in it as `name:0,2`, if they are few."""
    seq: int = 0
    """The how-manieth of its group, from 1: ranks meet in equal ones. 0 for what is not counted."""
    time: float = 0.0
    """When it was entered, by `time.monotonic()`."""
    state: str = "inside"
    """`inside`, `left` or `raised`."""


_STATES = ("", "inside", "left", RAISED)
_MAGIC = b"samestep"
_HEAD = struct.Struct("<8siiqQ")  # magic, rank, -, process, thread that runs the script
_LIFE = struct.Struct("<ddqi")  # last sign of life besides steps, steps, calls, exit code
_PHASE = struct.Struct("<d48s")  # how many times as long as a step it may take, name
_STEPS = struct.Struct("<64d")  # when each of the last steps ended
_VISIT = struct.Struct("<dqB495s")
_AT_LIFE = _HEAD.size
_AT_PHASE, _AT_STEPS = 64, 128
_AT_NOW = _AT_STEPS + _STEPS.size
_AT_CALLS = _AT_NOW + _VISIT.size
_NUM_STEPS, _NUM_CALLS = 64, 64
_SIZE = _AT_CALLS + _NUM_CALLS * _VISIT.size
assert (_AT_LIFE + 8, _AT_STEPS, _NUM_STEPS) == (5 * 8, 16 * 8, 64), "as `step` writes them"
_STEPPING = ("", 1.0)
_now = time.monotonic
_RUNS = -(1 << 31)  # no exit code yet
_LONGEST_WHERE, _LONGEST_DETAIL = 300, 80


class Pulse:
    """Writes one rank's pulse. Open it in the process, and the thread, that runs the script."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        path = folder / PULSE.format(rank=rank)
        path.unlink(missing_ok=True)  # a process of an earlier start may have it mapped
        with path.open("w+b") as file:
            file.write(bytes(_SIZE))  # a hole on a full disk would end the rank later
            file.flush()
            self._be_mapped(mmap.mmap(file.fileno(), _SIZE))
        self.now: Visit | None = None
        self._calls = 0
        self._code = _RUNS
        self.phase = _STEPPING
        """What it does besides its steps, and how many times as long as a step that may take."""
        self._counts: Counter[str] = Counter()
        self._inside: list[Visit] = []
        self._stacks = (folder / STACKS.format(rank=rank)).open("wb")
        # Its handler is C and needs no GIL. Forked children keep it, and write to the same file.
        faulthandler.register(DUMP_SIGNAL, self._stacks, all_threads=True, chain=False)
        os.register_at_fork(after_in_child=functools.partial(_let_go, weakref.ref(self)))
        self.alive()
        self._be(rank)

    def _be_mapped(self, mapped: mmap.mmap | bytearray) -> None:
        self._map = mapped
        self._cells = memoryview(mapped).cast("d")

    def _be(self, rank: int) -> None:
        self.rank = rank
        _HEAD.pack_into(self._map, 0, _MAGIC, rank, 0, os.getpid(), threading.get_ident())

    def become(self, folder: Path, rank: int) -> None:
        """Continue as a rank that only now has its number."""
        for name in (PULSE, STACKS):
            (folder / name.format(rank=self.rank)).rename(folder / name.format(rank=rank))
        self._be(rank)

    def close(self) -> None:
        """Stop; the file stays."""
        faulthandler.unregister(DUMP_SIGNAL)
        self._stacks.close()
        self._be_mapped(bytearray(_SIZE))

    def alive(self) -> None:
        """Note a sign of life, as a batch that was read."""
        life = time.monotonic(), self._cells[5], self._calls, self._code
        _LIFE.pack_into(self._map, _AT_LIFE, *life)

    def turn_to(self, phase: str, times: float = 1.0) -> None:
        """Set the phase besides steps; an empty one ends it, and so does the next step."""
        self.phase = (phase, times) if phase else _STEPPING
        _PHASE.pack_into(self._map, _AT_PHASE, times, phase.encode())
        self.alive()

    def step(self, number: int) -> None:
        """Note that the optimizer step of this number, from 1, has ended."""
        if self.phase is not _STEPPING:
            self.turn_to("")
        # After a step the caches are full of tensors, and each name that is looked up costs.
        self._cells[16 + number % 64] = _now()
        self._cells[5] = number

    def ended(self, code: int) -> None:
        """Note that the script has ended with this exit code."""
        self._code = code
        self.alive()

    @contextmanager
    def inside(
        self, kind: str, detail: str = "", where: str = "", group: str = NO_GROUP, seq: int = 0
    ) -> Iterator[Visit]:
        """Note a call that may wait for others, from its beginning to its end.

        Calls of a group get the next number of it. One that has its `seq` already, as a wait for
        what was begun before, keeps that and is not a new call.
        """
        again = seq > 0 or group == NO_GROUP
        if not again:
            seq = self._counts[group] = self._counts[group] + 1
        visit = Visit(kind, detail, where, group, seq, time.monotonic())
        place = 0
        if not again:
            place = _AT_CALLS + self._calls % _NUM_CALLS * _VISIT.size
            self._calls += 1
            call = self._calls
            self._write(place, visit)
        self._inside.append(visit)
        self._turn_to(visit)
        state = "left"
        try:
            yield visit
        except BaseException:
            state = RAISED
            raise
        finally:
            if place and self._calls - call < _NUM_CALLS:  # else another has its place
                self._map[place + 16] = _STATES.index(state)
            self._inside.remove(visit)  # the last one, unless several threads are inside
            self._turn_to(self._inside[-1] if self._inside else None)

    def _turn_to(self, visit: Visit | None) -> None:
        self.now = visit
        if visit is None:
            self._map[_AT_NOW + 16] = 0
        else:
            self._write(_AT_NOW, visit)
        self.alive()

    def _write(self, place: int, visit: Visit) -> None:
        detail = visit.detail[:_LONGEST_DETAIL]
        text = f"{visit.group}\0{visit.kind}\0{detail}\0".encode()
        text += visit.where.encode(errors="replace")[-_LONGEST_WHERE:]
        state = _STATES.index(visit.state)
        _VISIT.pack_into(self._map, place, visit.time, visit.seq, state, text)


def _let_go(pulse: weakref.ref[Pulse]) -> None:
    """In a forked child, as a loader worker: what it does is not a sign of life of the rank."""
    if (own := pulse()) is not None:
        own._be_mapped(bytearray(_SIZE))  # noqa: SLF001 - a part of the class


@dataclass(frozen=True, kw_only=True)
class RankPulse:
    """What a rank's pulse said when it was read."""

    rank: int
    pid: int = 0
    thread: int = 0
    """The thread that runs the script, as `threading.get_ident()` names it."""
    moved: float = 0.0
    """The last sign of life, by `time.monotonic()`."""
    steps: int = 0
    step_times: tuple[float, ...] = ()
    """Seconds of the last steps, the latest last."""
    code: int | None = None
    """The exit code, once the script has ended."""
    doing: str = ""
    """What it does besides its steps: `start`, `evaluation`, `checkpoint` …"""
    times: float = 1.0
    """How many times as long as a step that may take."""
    now: Visit | None = None
    """The innermost call that the rank is in."""
    calls: tuple[Visit, ...] = ()
    """The last collectives and backward passes, the latest last."""

    @property
    def phase(self) -> str:
        """`ended`, or what it does besides its steps, or the call that it is in, or `training`."""
        if self.code is not None:
            return "ended"
        return self.doing or (self.now.kind if self.now else "training")

    def raised(self) -> "RankPulse":
        """Return this pulse with the call that the rank died in as one that raised."""
        *before, last = self.calls or (Visit(UNKNOWN),)
        died = last._replace(state=RAISED) if last.state == "inside" else last
        return replace(self, calls=(*before, died))


def read_pulse(path: Path) -> RankPulse | None:
    """Read a rank's pulse; return None if there is none yet."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) < _SIZE or not data.startswith(_MAGIC):
        return None
    _, rank, _, pid, thread = _HEAD.unpack_from(data)
    moved, steps, calls, code = _LIFE.unpack_from(data, _AT_LIFE)
    times, phase = _PHASE.unpack_from(data, _AT_PHASE)
    ends = sorted(filter(None, _STEPS.unpack_from(data, _AT_STEPS)))
    first = max(0, calls - _NUM_CALLS)
    places = (_AT_CALLS + call % _NUM_CALLS * _VISIT.size for call in range(first, calls))
    visits = (_read_visit(data, place) for place in places)
    return RankPulse(
        rank=rank,
        pid=pid,
        thread=thread,
        moved=max([moved, *ends[-1:]]),
        steps=int(steps),
        step_times=tuple(after - before for before, after in itertools.pairwise(ends)),
        code=None if code == _RUNS else code,
        doing=phase.rstrip(b"\0").decode(errors="replace"),
        times=times,
        now=_read_visit(data, _AT_NOW),
        calls=tuple(visit for visit in visits if visit),
    )


def read_pulses(folder: Path) -> list[RankPulse]:
    """Read the pulses in a folder, in rank order."""
    pulses = (read_pulse(path) for path in folder.glob(PULSE.format(rank="*")))
    return sorted((pulse for pulse in pulses if pulse), key=lambda pulse: pulse.rank)


def _read_visit(data: bytes, place: int) -> Visit | None:
    when, seq, state, text = _VISIT.unpack_from(data, place)
    if not 0 < state < len(_STATES):
        return None
    group, kind, detail, where, *_ = f"{text.decode(errors='ignore')}\0\0\0".split("\0")
    return Visit(kind, detail, where, group, seq, when, _STATES[state])


def users_place(frames: Iterable[tuple[str, int, Any]]) -> str:
    """Return FILE:LINE of the user's innermost of (file, line, …), the innermost first.

    Where there is none, as in `samestep train`, it is samestep's innermost.
    """
    other = ""
    for file, line, _ in frames:
        if is_users(file):
            return f"{file}:{line}"
        if not other and f"{os.sep}samestep{os.sep}" in file and _OWN not in file:
            other = f"{file}:{line}"
    return other


_OWN = f"{Path(__file__).parent}{os.sep}"
