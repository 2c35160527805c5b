"""Which processes of this machine belong to a sandbox, and how to end them.

A process id is never enough, since a stale one may be anybody's by now. What we start carries the
sandbox's folder in its environment, slurmstepd inherits it, and Slurm gives each task its own.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MARK, MARK_DAEMON = "SAMESTEP_SANDBOX", "SAMESTEP_SANDBOX_DAEMON"

_PROC = Path("/proc")
_DAEMONS = ("munged", "slurmctld", "slurmd")
_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process of a sandbox: a daemon, a slurmstepd, or a process of a job."""

    pid: int
    """Its id now; look again before a signal is sent."""

    name: str
    """The program's name as the kernel knows it."""

    part: str
    """The part it belongs to: munged, slurmctld, or the name of a node."""

    @property
    def is_daemon(self) -> bool:
        """Whether it is one of the daemons that `up` started, not what came of a job."""
        return self.name.removesuffix("-wlm") in _DAEMONS  # Debian's names end so

    @property
    def is_of_job(self) -> bool:
        """Whether it came of a job: slurmstepd, or what that started."""
        return not self.is_daemon and self.name != "slurmscriptd"  # slurmctld's helper


def find_processes(folder: Path) -> list[Process]:
    """Return all processes of the sandbox in a folder, without this one and its ancestors.

    Zombies do not count. A folder that is gone is fine: processes keep its name.
    """
    everyone = dict(_everyone())
    spared = set(_ancestors(os.getpid(), everyone))
    found = {pid: part for pid, one in everyone.items() if (part := one.part_of(folder))}
    # What a job started with a clean environment is known by its parents alone.
    for pid in everyone:
        line = _ancestors(pid, everyone)
        part = next((found[ancestor] for ancestor in line if ancestor in found), None)
        if part is not None:
            found[pid] = part
    return [
        Process(pid=pid, name=everyone[pid].name, part=part)
        for pid, part in sorted(found.items())
        if pid not in spared
    ]


def end(find: Callable[[], list[Process]], *, term_within_s: float) -> list[Process]:
    """Send SIGTERM to the processes that `find` finds, SIGKILL to those still there after that.

    Returns:
        Those that are there after all of it: none, unless the kernel cannot end them.
    """
    for process in find():
        _send(process, signal.SIGTERM)
    if wait_until(lambda: not find(), within_s=term_within_s):
        return []

    def killed() -> bool:
        rest = find()
        for process in rest:
            _send(process, signal.SIGKILL)
        return not rest

    wait_until(killed, within_s=10)
    return find()


def kill(processes: list[Process]) -> None:
    """Send SIGKILL to processes that were found just now."""
    for process in processes:
        _send(process, signal.SIGKILL)


def wait_until(condition: Callable[[], bool], *, within_s: float) -> bool:
    """Return whether a condition came true within a number of seconds."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _send(process: Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(process.pid, number)


@dataclass(frozen=True)
class _Seen:
    name: str
    parent: int
    environment: dict[str, str]

    def part_of(self, folder: Path) -> str | None:
        """Return the part of the sandbox that the process' own environment names."""
        if self.environment.get(MARK) == str(folder):
            return self.environment.get(MARK_DAEMON)
        # A shell of salloc's has SLURM_CONF too, but is the user's own: it is no task.
        is_task = "SLURM_TASK_PID" in self.environment
        if is_task and self.environment.get("SLURM_CONF") == f"{folder}/slurm.conf":
            return self.environment.get("SLURMD_NODENAME", "slurmctld")
        return None


def _everyone() -> Iterator[tuple[int, _Seen]]:
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        # It may end while we look, and another user's environment is not ours to read.
        with suppress(OSError):
            # pid (name) state parent …: the name itself may hold spaces and brackets.
            head, _, tail = (entry / "stat").read_text(errors="replace").rpartition(")")
            state, parent, *_ = tail.split()
            if state in "ZX":
                continue
            environment = {}
            with suppress(PermissionError):
                lines = (entry / "environ").read_bytes().split(b"\0")
                pairs = (os.fsdecode(line).partition("=") for line in lines)
                environment = {name: value for name, _, value in pairs if name}
            yield int(entry.name), _Seen(head.partition("(")[2], int(parent), environment)


def _ancestors(pid: int, everyone: dict[int, _Seen]) -> list[int]:
    """Return a process' own id, its parent's, and so on, up to one whose parent is unknown."""
    line = []
    while pid in everyone and pid not in line:
        line.append(pid)
        pid = everyone[pid].parent
    return line
