"""Where the threads of a rank and of its loader workers stand, as seen from another process.

/proc says whether a process is stopped, sleeping or computing; a signal makes it write its stack,
even while C code holds the GIL. Without /proc, only the pulse is known.
"""

import ctypes
import itertools
import os
import re
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from samestep.launch.stall.pulse import DUMP_SIGNAL, STACKS, RankPulse, users_place

Doing = Literal["sleeps", "computes", "stopped", "blocked", "gone", "unknown"]

_PROC = Path("/proc")
_LOOK_S, _BUSY_FRACTION = 0.3, 0.2  # several that spin may share a core
_DUMP_S, _POLL_EVERY_S = 2.0, 0.02
_STILL = 3  # polls without more bytes that end a dump: it is written in small pieces

_THREAD = re.compile(r"^(?:Current t|T)hread 0x([0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_ESCAPED = re.compile(r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\U([0-9a-f]{8})")
_LOADER = os.path.join("torch", "utils", "data", "dataloader.py")  # noqa: PTH118 - a part of a path
_WORKER = os.path.join("torch", "utils", "data", "_utils", "worker.py")  # noqa: PTH118


class StackFrame(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, kw_only=True)
class Stand:
    """Where a process stands: its main thread's stack, and what the system says of it."""

    pid: int
    doing: Doing = "unknown"
    frames: tuple[StackFrame, ...] = ()
    """The innermost first; none if the process could not write them."""

    @property
    def place(self) -> str:
        """The user's innermost line as FILE:LINE, or nothing."""
        return users_place(self.frames)


@dataclass(frozen=True, kw_only=True)
class RankStand(Stand):
    """Where a rank stands, with its pulse."""

    pulse: RankPulse
    workers: tuple[Stand, ...] = ()
    """Its loader workers, if it waits for one; their frames are above the loader's own loop."""

    @property
    def rank(self) -> int:
        """The rank's number."""
        return self.pulse.rank

    @property
    def waits_for_data(self) -> bool:
        """Whether it stands in PyTorch's loader, and computes no sample itself."""
        frames = itertools.takewhile(lambda frame: users_place([frame]) == "", self.frames)
        return any(frame.file.endswith(_LOADER) for frame in frames)


def inspect_ranks(folder: Path, pulses: Sequence[RankPulse]) -> list[RankStand]:
    """Inspect the ranks of this node: within a second, or two for each that is stuck."""
    doing = _doing([pulse.pid for pulse in pulses])
    stands = []
    for pulse in pulses:
        frames = _dump(folder, pulse, pulse.pid, doing)
        stand = RankStand(pid=pulse.pid, doing=doing[pulse.pid], frames=frames, pulse=pulse)
        workers = _inspect_workers(folder, pulse) if stand.waits_for_data else ()
        stands.append(replace(stand, workers=workers))
    return stands


def _inspect_workers(folder: Path, pulse: RankPulse) -> tuple[Stand, ...]:
    """Return a rank's loader workers with their stacks, without idle frames."""
    pids = [pid for pid in _children(pulse.pid) if _listens(pid)]
    doing = _doing(pids)
    stands = []
    for pid in pids:
        frames = _dump(folder, pulse, pid, doing)
        # Below are the frames of the rank that forked it.
        ends = [n for n, frame in enumerate(frames) if frame.file.endswith(_WORKER)]
        if ends or doing[pid] == "stopped":
            frames = frames[: ends[-1]] if ends else ()
            stands.append(Stand(pid=pid, doing=doing[pid], frames=frames))
    return tuple(stands)


def _dump(
    folder: Path, pulse: RankPulse, pid: int, doing: Mapping[int, Doing]
) -> tuple[StackFrame, ...]:
    """Let a process write its stacks, and return that of its main thread; nothing if it cannot.

    A stopped process continues for that moment.
    """
    path = folder / STACKS.format(rank=pulse.rank)
    if doing[pid] == "gone" or not _listens(pid):
        return ()
    try:
        begin = size = path.stat().st_size
        still = 0
        if doing[pid] == "stopped":
            _wake(pid)
        else:
            os.kill(pid, DUMP_SIGNAL)
        until = time.monotonic() + _DUMP_S
        while time.monotonic() < until:
            time.sleep(_POLL_EVERY_S)
            before, size = size, path.stat().st_size
            still = still + 1 if size > begin and size == before else 0
            if still >= _STILL:
                with path.open("rb") as file:
                    file.seek(begin)
                    frames = _stack_of(pulse.thread, file.read().decode(errors="replace"))
                if frames:
                    return frames
    except OSError:  # it has just ended
        pass
    finally:
        if doing[pid] == "stopped":
            with suppress(OSError):
                os.kill(pid, signal.SIGSTOP)
    return ()


def _wake(pid: int) -> None:
    """Let a stopped process continue, and write its stacks first."""
    # To the main thread: by `os.kill` another one may get it, while the main thread continues.
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)  # glibc has it since 2.30
    if tgkill is None or tgkill(pid, pid, DUMP_SIGNAL):
        os.kill(pid, DUMP_SIGNAL)
    os.kill(pid, signal.SIGCONT)


def _stack_of(thread: int, dump: str) -> tuple[StackFrame, ...]:
    """Return the frames of one thread in what faulthandler wrote."""
    stack: list[StackFrame] = []
    is_it = False
    for line in dump.splitlines():
        if match := _THREAD.match(line):
            is_it = int(match[1], 16) == thread
        elif is_it and (match := _FRAME.match(line)):
            file = _ESCAPED.sub(lambda e: chr(int(e[1] or e[2] or e[3], 16)), match[1])
            stack.append(StackFrame(file, int(match[2]), match[3]))
    return tuple(stack)


def host_name() -> str:
    """Return this node's name, in a job of Slurm that which Slurm knows."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def state_of(pid: int) -> str:
    """Return the letter by which the system names a process's state; "" once it has ended."""
    stat = _stat(pid) if _PROC.is_dir() else None
    if stat is not None:
        return "" if stat[0] in "ZX" else stat[0]
    try:
        os.kill(pid, 0)
    except OSError:
        return ""
    return "" if _PROC.is_dir() else "R"


def _doing(pids: Sequence[int]) -> dict[int, Doing]:
    """Return the activity of processes, by their main threads' computing time in a moment."""
    before = {pid: _stat(pid) for pid in pids}
    time.sleep(_LOOK_S if pids else 0)
    return {pid: _did(before[pid], _stat(pid)) for pid in pids}


def _did(before: tuple[str, float] | None, after: tuple[str, float] | None) -> Doing:
    if not _PROC.is_dir():
        return "unknown"
    if before is None or after is None or after[0] in "ZX":
        return "gone"
    if after[0] in "Tt":
        return "stopped"
    states = before[0] + after[0]
    # Where many share a core, it computes little and is always about to (R).
    if after[1] - before[1] > _BUSY_FRACTION * _LOOK_S or states in ("RR", "RD", "DR"):
        return "computes"
    return "blocked" if states == "DD" else "sleeps"


def _stat(pid: int) -> tuple[str, float] | None:
    """Return the state of a process's main thread, and the seconds that it has computed."""
    try:
        text = (_PROC / f"{pid}/task/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # a name may have blanks
    return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def computed_s(pid: int) -> float:
    """Return the seconds that a process's main thread has computed; 0 if nothing tells."""
    return stat[1] if (stat := _stat(pid)) is not None else 0.0


def working(pids: Sequence[int]) -> dict[int, float]:
    """Return the processes, with children, that compute now, and their computing time in s."""
    doing = _doing([process for pid in pids for process in (pid, *_children(pid))])
    return {pid: computed_s(pid) for pid, does in doing.items() if does == "computes"}


def _children(pid: int) -> list[int]:
    children = []
    for path in _PROC.glob("[0-9]*/stat"):
        try:
            parent = path.read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue  # it has just ended
        if int(parent) == pid:
            children.append(int(path.parent.name))
    return sorted(children)


def _listens(pid: int) -> bool:
    """Whether a process writes its stacks when asked: the signal would end any other."""
    try:
        lines = (_PROC / f"{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (DUMP_SIGNAL - 1) & 1)
