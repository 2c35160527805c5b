"""A sandbox's daemons: start them, ask Slurm about them, find and end all processes.

A stored process id is not enough, since a stale one may belong to anybody. A process of a sandbox
is known by its environment: the daemons have the folder in it, slurmstepd inherits it, and Slurm
sets its own variables for each task.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from samestep.base.errors import UserError
from samestep.cluster.slurm.queue import outside_of_any_job

MARK, MARK_DAEMON = "SAMESTEP_SANDBOX", "SAMESTEP_SANDBOX_DAEMON"

_DAEMONS = ("munged", "slurmctld", "slurmd")
_POLL_EVERY_S = 0.05
_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo", "squeue", "scancel")
_ADMIN_FOLDERS = "/usr/sbin:/usr/local/sbin:/sbin"
_START_WITHIN_S = 20.0
_ANSWER_WITHIN_S = 10.0
_LOG_TAIL_LINES = 15

# Below the ports that Linux gives to outgoing connections (32768 and up), so that a port is still
# free when its daemon comes to it, and when a killed daemon comes back to it.
_PORTS = range(12_000, 32_000)


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process of a sandbox: a daemon, a slurmstepd, or a process of a job."""

    pid: int  # its id now; look it up again before sending a signal
    name: str  # the program's name as the kernel knows it
    part: str  # the part it belongs to: munged, slurmctld, or the name of a node

    @property
    def is_daemon(self) -> bool:
        """Whether it is one of the daemons that `up` started."""
        return self.name.removesuffix("-wlm") in _DAEMONS  # Debian's suffix

    @property
    def is_of_job(self) -> bool:
        """Whether a job started it: slurmstepd and its children."""
        return not self.is_daemon and self.name != "slurmscriptd"  # slurmctld's helper


def find_processes(folder: Path) -> list[Process]:
    """Return a sandbox's processes, except zombies and our ancestors; its folder may be gone."""
    # The environment of another user's process is None.
    running = {
        process.pid: process.info
        for process in psutil.process_iter(["name", "ppid", "status", "environ"])
        if process.info["status"] != psutil.STATUS_ZOMBIE
    }
    spared = _with_ancestors(os.getpid(), running)
    parts = {pid: _part_of(folder, info["environ"] or {}) for pid, info in running.items()}
    processes = []
    for pid in sorted(running.keys() - spared.keys()):
        # What a job started with an empty environment is known only by its parents.
        part = next((parts[p] for p in _with_ancestors(pid, running) if parts[p]), None)
        if part is not None:
            processes.append(Process(pid=pid, name=running[pid]["name"], part=part))
    return processes


def end(find: Callable[[], list[Process]], term_within_s: float) -> list[Process]:
    """Send SIGTERM to what `find` finds, then SIGKILL; return what still runs."""
    send(find(), signal.SIGTERM)
    if wait_until(lambda: not find(), term_within_s):
        return []
    wait_until(lambda: not send(find(), signal.SIGKILL), 10)
    return find()


def send(processes: list[Process], number: signal.Signals) -> list[Process]:
    """Send a signal to processes that were just found, and return them."""
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, number)
    return processes


def wait_until(condition: Callable[[], bool], within_s: float) -> bool:
    """Return whether a condition became true within a number of seconds."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_EVERY_S)
    return True


def _part_of(folder: Path, environment: dict[str, str]) -> str | None:
    if environment.get(MARK) == str(folder):
        return environment.get(MARK_DAEMON)
    # The shell of salloc has SLURM_CONF, too, but belongs to the user: it is not a task.
    is_task = "SLURM_TASK_PID" in environment
    if is_task and environment.get("SLURM_CONF") == f"{folder}/slurm.conf":
        return environment.get("SLURMD_NODENAME", "slurmctld")
    return None


def _with_ancestors(pid: int, running: dict[int, dict[str, Any]]) -> dict[int, None]:
    """Return a process's id, its parent's, and so on, up to one whose parent is unknown."""
    line: dict[int, None] = {}
    while pid in running and pid not in line:
        line[pid] = None
        pid = running[pid]["ppid"]
    return line


class DaemonError(UserError):
    """A daemon did not come up; the message ends with what it logged."""

    def __init__(self, folder: Path, daemon: str, problem: str) -> None:
        try:
            lines = log_file(folder, daemon).read_text(errors="replace").splitlines()
        except OSError:
            lines = []
        tail = "\n".join(f"  {line}" for line in lines[-_LOG_TAIL_LINES:]) or "  (nothing)"
        super().__init__(f"The sandbox did not come up: {problem}. {daemon} logged last:\n{tail}")


def missing_programs() -> list[str]:
    """Return the programs that a sandbox needs and this machine lacks."""
    return [name for name in _PROGRAMS if _find(name) is None]


def log_file(folder: Path, daemon: str) -> Path:
    """Return the log of a daemon: munged, slurmctld, or a node's slurmd by the node's name."""
    return folder / "log" / f"{daemon}.log"


def start(folder: Path, daemon: str) -> None:
    """Start munged, slurmctld, or the slurmd of the node of this name."""
    conf, munge = f"{folder}/slurm.conf", folder / "munge"
    if daemon not in ("munged", "slurmctld"):
        _run(folder, daemon, "slurmd", "-N", daemon, "-f", conf)
        return
    if daemon == "slurmctld":
        _run(folder, daemon, "slurmctld", "-f", conf)
    else:
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "seed-file": "seed"}
        options = [f"--{name}={munge}/{file}" for name, file in files.items()]
        log = f"--log-file={log_file(folder, 'munged')}"
        # --force: else munged refuses a folder of which a parent is writable by others.
        _run(folder, daemon, "munged", "--force", "--origin=127.0.0.1", log, *options)

    def answers() -> bool:
        if daemon == "slurmctld":
            return ask(folder, "scontrol", "ping") is not None
        with socket.socket(socket.AF_UNIX) as client:
            return client.connect_ex(str(munge / "socket")) == 0

    if not wait_until(answers, _START_WITHIN_S):
        raise DaemonError(folder, daemon, f"{daemon} does not answer")


def ask(folder: Path, name: str, *arguments: str) -> str | None:
    """Run one of Slurm's programs in the sandbox; return its output, None if it failed."""
    words, shown = [_find(name) or name, *arguments], environment(folder)
    try:
        return subprocess.check_output(
            words, env=shown, text=True, stderr=subprocess.DEVNULL, timeout=_ANSWER_WITHIN_S
        )
    except (FileNotFoundError, subprocess.SubprocessError):
        return None


def environment(folder: Path) -> dict[str, str]:
    """Return this process's environment for the sandbox: without other clusters, jobs or steps."""
    outside = outside_of_any_job(os.environ)
    outside_slurm = {k: v for k, v in outside.items() if not k.startswith(("SLURM_", "SBATCH_"))}
    return outside_slurm | {"SLURM_CONF": f"{folder}/slurm.conf"}


def node_states(folder: Path) -> dict[str, str]:
    """Return each node's state, which ends in `*` if its slurmd is silent; {} if no controller."""
    text = ask(folder, "sinfo", "--noheader", "--Node", "--partition=debug", "--format=%N %T")
    return dict(line.split(maxsplit=1) for line in (text or "").splitlines())


def free_ports(count: int) -> list[int]:
    """Return ports on which nothing listens now."""
    free: list[int] = []
    for port in secrets.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))  # on all addresses, as Slurm's daemons do
            free.append(port)
        if len(free) == count:
            return free
    raise UserError(f"There are no {count} free ports between {_PORTS.start} and {_PORTS.stop}.")


def _find(name: str) -> str | None:
    """Return a program's path; daemons are often not on an ordinary user's PATH."""
    return shutil.which(name) or shutil.which(name, path=_ADMIN_FOLDERS)


def _run(folder: Path, daemon: str, name: str, *arguments: str) -> None:
    marks = {MARK: str(folder), MARK_DAEMON: daemon}
    # It goes into the background by itself; what it prints before that belongs in its log.
    with log_file(folder, daemon).open("ab") as log:
        try:
            code = subprocess.run(
                [_find(name) or name, *arguments],
                env=environment(folder) | marks,
                check=False,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=_START_WITHIN_S,
                start_new_session=True,
            ).returncode
        except subprocess.TimeoutExpired:
            raise DaemonError(folder, daemon, f"{name} did not start in time") from None
    if code:
        raise DaemonError(folder, daemon, f"{name} stopped with exit code {code}")
