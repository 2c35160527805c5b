"""Which processes of this machine belong to a sandbox, and how to end them.

A process id is never enough, since a stale one may be anybody's by now. What we start carries the
sandbox's folder in its environment, slurmstepd inherits it, and Slurm gives each task its own.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

MARK, MARK_DAEMON = "SAMESTEP_SANDBOX", "SAMESTEP_SANDBOX_DAEMON"

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
    # Another user's environment is not ours to read: it is None.
    looks = psutil.process_iter(["name", "ppid", "status", "environ"])
    everyone = {one.pid: one.info for one in looks if one.info["status"] != psutil.STATUS_ZOMBIE}
    spared = _with_ancestors(os.getpid(), everyone)
    parts = {pid: _part_of(folder, info["environ"] or {}) for pid, info in everyone.items()}
    found = []
    for pid in sorted(everyone.keys() - spared.keys()):
        # What a job started with a clean environment is known by its parents alone.
        part = next((parts[one] for one in _with_ancestors(pid, everyone) if parts[one]), None)
        if part is not None:
            found.append(Process(pid=pid, name=everyone[pid]["name"], part=part))
    return found


def end(find: Callable[[], list[Process]], term_within_s: float) -> list[Process]:
    """Send SIGTERM to what `find` finds, SIGKILL to the rest; return what even that did not end."""
    send(find(), signal.SIGTERM)
    if wait_until(lambda: not find(), term_within_s):
        return []
    wait_until(lambda: not send(find(), signal.SIGKILL), 10)
    return find()


def send(processes: list[Process], number: signal.Signals) -> list[Process]:
    """Send a signal to processes that were found just now, and return them."""
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, number)
    return processes


def wait_until(condition: Callable[[], bool], within_s: float) -> bool:
    """Return whether a condition came true within a number of seconds."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _part_of(folder: Path, environment: dict[str, str]) -> str | None:
    """Return the part of the sandbox that a process' own environment names."""
    if environment.get(MARK) == str(folder):
        return environment.get(MARK_DAEMON)
    # A shell of salloc's has SLURM_CONF too, but is the user's own: it is no task.
    is_task = "SLURM_TASK_PID" in environment
    if is_task and environment.get("SLURM_CONF") == f"{folder}/slurm.conf":
        return environment.get("SLURMD_NODENAME", "slurmctld")
    return None


def _with_ancestors(pid: int, everyone: dict[int, dict[str, Any]]) -> dict[int, None]:
    """Return a process' own id, its parent's, and so on, up to one whose parent is unknown."""
    line: dict[int, None] = {}
    while pid in everyone and pid not in line:
        line[pid] = None
        pid = everyone[pid]["ppid"]
    return line
