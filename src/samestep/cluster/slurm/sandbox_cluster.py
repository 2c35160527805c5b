"""A sandbox, a real Slurm on this machine: its `slurm.conf` and other files; up, status, down."""

import fcntl
import os
import pwd
import re
import secrets
import shlex
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from string import Template

from samestep.base.errors import UserError
from samestep.cluster.slurm import sandbox_daemons as daemons
from samestep.cluster.slurm.sandbox_daemons import end, find_processes, free_ports, wait_until

HEADER = "# Written by `samestep slurm sandbox up`; `… down` removes it."
"""The first line of a sandbox's `slurm.conf`, by which `down` recognizes a sandbox."""

LONGEST_SOCKET_BYTES = 107  # Linux has 108, and the last is zero

TASK_PROLOG = """\
#!/bin/sh
# Ranks that plain `srun` starts meet at the first name of the node list, and node1 is not a name
# that resolves: all nodes are this machine.
[ -n "${MASTER_ADDR+set}" ] || echo export MASTER_ADDR=127.0.0.1
"""
"""Slurm sets the variables that a task prolog prints in the environment of the task."""


def node_names(count: int) -> list[str]:
    """Return node1 … nodeN."""
    return [f"node{number}" for number in range(1, count + 1)]


def slurm_conf(
    folder: Path,
    *,
    user: str,
    host: str,
    controller_port: int,
    node_ports: Sequence[int],
    cpus: int,
    first_job: int = 1,
) -> str:
    """Return the `slurm.conf` of one machine, by its short name, that plays several nodes."""
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
        f"CPUs={cpus} RealMemory=8192"  # MiB; nothing enforces it
        for name, port in zip(node_names(len(node_ports)), node_ports, strict=True)
    )
    template = Template(Path(__file__).with_name("sandbox.conf").read_text(encoding="utf-8"))
    return template.substitute(
        header=HEADER,
        user=user,
        host=host,
        controller_port=controller_port,
        folder=folder,
        first_job=first_job,
        nodes=nodes,
    )


def nodes_of(text: str) -> list[str]:
    """Return the names of the nodes in the text of a sandbox's `slurm.conf`."""
    return re.findall(r"^NodeName=(\S+)", text, re.MULTILINE)


def check_folder(folder: Path, *, nodes: int) -> None:
    """Refuse a folder whose path is too long for a socket or not possible in `slurm.conf`."""
    if strange := sorted(set(re.sub(r"[\w./@+~-]", "", str(folder)))):
        raise UserError(
            f"A sandbox cannot be in {folder}: `slurm.conf` cannot hold a path with "
            f"{' '.join(repr(character) for character in strange)}. Choose another with --dir."
        )
    # slurmstepd's socket is the longest: SPOOL/NODE_JOB.STEP
    longest = f"{folder}/spool/node{nodes}/node{nodes}_9999999.{2**32 - 1}"
    if len(longest.encode()) > LONGEST_SOCKET_BYTES:
        raise UserError(
            f"A sandbox cannot be in {folder}: a socket in it would have a path of "
            f"{len(longest.encode())} bytes, and Linux allows {LONGEST_SOCKET_BYTES}. Choose a "
            "shorter one, as in `--dir /tmp/sandbox`."
        )


# All that a sandbox writes, and all that `down` removes; slurm.conf goes last, since the folder is
# recognized by it.
_FOLDERS = ("munge", "state", "spool", "log")
_FILES = ("task_prolog.sh", ".gitignore", "slurm.conf")


def default_folder() -> Path:
    """Return the default folder of a sandbox, in the user's state folder."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "samestep" / "sandbox"


def export_line(folder: Path) -> str:
    """Return the shell command that makes Slurm's programs use the sandbox."""
    return f"export SLURM_CONF={shlex.quote(str(folder.resolve() / 'slurm.conf'))}"


def down_line(folder: Path) -> str:
    """Return the command that takes the sandbox of a folder down."""
    is_default = folder.resolve() == default_folder().resolve()
    where = "" if is_default else f" --dir {shlex.quote(str(folder))}"
    return f"samestep slurm sandbox down{where}"


def make_folder(folder: Path) -> None:
    """Make the folder, readable by this user only; refuse one with other files in it."""
    try:
        if folder.is_dir() and not is_sandbox(folder) and any(folder.iterdir()):
            raise UserError(f"{folder} has files and is not a sandbox. Choose an empty --dir.")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError as error:
        raise UserError(
            f"{folder} cannot hold a sandbox: {error.strerror}. Choose another with --dir."
        ) from error


def write_files(folder: Path, *, nodes: int, cpus: int, first_job: int = 1) -> None:
    """Write the configuration and a new key, and make the daemons' folders."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        raise UserError(f"Slurm needs a name in /etc/passwd for uid {os.getuid()}.") from None
    host, (port, *ports) = socket.gethostname().partition(".")[0], free_ports(nodes + 1)
    text = slurm_conf(
        folder,
        user=user,
        host=host,
        controller_port=port,
        node_ports=ports,
        cpus=cpus,
        first_job=first_job,
    )
    # First: by it the folder is recognized as a sandbox, should we be killed in between.
    (folder / "slurm.conf").write_text(text)
    # Neither git nor the copy of the code that a job runs takes the key and the logs.
    (folder / ".gitignore").write_text("*\n")
    for name in (*_FOLDERS, *(f"spool/{node}" for node in node_names(nodes))):
        (folder / name).mkdir(mode=0o700)
    (folder / "munge" / "key").write_bytes(secrets.token_bytes(128))
    (folder / "munge" / "key").chmod(0o600)
    (folder / "task_prolog.sh").write_text(TASK_PROLOG)
    (folder / "task_prolog.sh").chmod(0o700)


def remove_files(folder: Path) -> None:
    """Remove the sandbox's files, and no other file in its folder."""
    for name in _FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in _FILES:
        (folder / name).unlink(missing_ok=True)


def is_sandbox(folder: Path) -> bool:
    """Whether a folder holds, or held, a sandbox."""
    try:
        return (folder / "slurm.conf").read_text(errors="replace").startswith(HEADER)
    except OSError:
        return False


_IDLE_WITHIN_S = 30.0
_TERM_WITHIN_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Status:
    """The daemons, nodes and job processes of a sandbox."""

    folder: Path
    daemons: dict[str, int | None]
    """The process id of each daemon by its name; None if it does not run."""
    nodes: dict[str, str]
    """The state of each node, as `sinfo` names it; empty if the controller does not answer."""
    num_job_processes: int  # with slurmstepd's

    @property
    def is_up(self) -> bool:
        """Whether all daemons run and the controller answers."""
        return bool(self.nodes) and None not in self.daemons.values()


def up(folder: Path, *, nodes: int, cpus: int | None = None, first_job: int = 1) -> Status:
    """Start a Slurm on this machine and wait until every node is idle; if not, end all of it."""
    folder = folder.resolve()
    cpus = max(4, os.cpu_count() or 1) if cpus is None else cpus
    if nodes < 1 or cpus < 1:
        raise UserError("A sandbox has at least one node (--nodes 1) of one CPU (--cpus 1).")
    if missing := daemons.missing_programs():
        raise UserError(
            f"A sandbox needs programs that are not here: {', '.join(missing)}. On Debian "
            "or Ubuntu, `apt install slurm-wlm munge` installs them; nothing needs to be set up."
        )
    check_folder(folder, nodes=nodes)
    make_folder(folder)
    with _locked(folder):
        _refuse_if_up(folder)
        remove_files(folder)
        write_files(folder, nodes=nodes, cpus=cpus, first_job=first_job)
        try:
            _start(folder, node_names(nodes))
        except BaseException:  # also Ctrl-C
            _end_all(folder)
            raise
        return status(folder)


def status(folder: Path) -> Status:
    """Return the state of the sandbox in a folder."""
    folder = folder.resolve()
    running = find_processes(folder)
    by_part = {process.part: process.pid for process in running if process.is_daemon}
    try:
        nodes = nodes_of((folder / "slurm.conf").read_text())
    except OSError:
        nodes = []
    # Without its controller or munged, Slurm's programs only wait.
    answers = by_part.keys() >= {"munged", "slurmctld"}
    return Status(
        folder=folder,
        daemons={daemon: by_part.get(daemon) for daemon in ("munged", "slurmctld", *nodes)},
        nodes=daemons.node_states(folder) if answers else {},
        num_job_processes=sum(process.is_of_job for process in running),
    )


def down(folder: Path) -> bool:
    """Cancel jobs, end daemons, remove files, also after a crash; return whether any were there."""
    folder = folder.resolve()
    try:
        is_there = folder.is_dir()
    except PermissionError:
        raise UserError(f"{folder} cannot be read: it belongs to another user.") from None
    if not is_there:
        return _end_all(folder)
    with _locked(folder):
        was_there = _end_all(folder)
        if not is_sandbox(folder):
            return was_there
        remove_files(folder)
        if not any(folder.iterdir()):
            folder.rmdir()
    return True


def _start(folder: Path, nodes: list[str]) -> None:
    for daemon in ("munged", "slurmctld", *nodes):
        daemons.start(folder, daemon)
    idle = dict.fromkeys(nodes, "idle")
    if not wait_until(lambda: daemons.node_states(folder) == idle, _IDLE_WITHIN_S):
        states = daemons.node_states(folder)
        late = next((node for node in nodes if states.get(node) != "idle"), "slurmctld")
        state = states.get(late, "unknown")
        raise daemons.DaemonError(folder, late, f"{late} is not idle but {state}")


def _end_all(folder: Path) -> bool:
    """End all processes of the sandbox; return whether there were any."""
    processes = find_processes(folder)
    if not processes:
        return False
    if {process.part for process in processes if process.is_daemon} >= {"munged", "slurmctld"}:
        # Through Slurm, so that clients that wait for a job see its end.
        jobs = daemons.ask(folder, "squeue", "--noheader", "--format=%A")
        if jobs and jobs.split():
            daemons.ask(folder, "scancel", "--quiet", *jobs.split())
            wait_until(
                lambda: not any(process.is_of_job for process in find_processes(folder)),
                _TERM_WITHIN_S,
            )
    if survivors := end(lambda: find_processes(folder), _TERM_WITHIN_S):
        names = ", ".join(f"{process.name} ({process.pid})" for process in survivors)
        raise UserError(f"These processes of the sandbox in {folder} do not end: {names}.")
    return True


def _refuse_if_up(folder: Path) -> None:
    now = status(folder)
    if now.is_up:
        raise UserError(
            f"A sandbox of {len(now.nodes)} nodes is up already in {folder}. To use it:\n"
            f"{export_line(folder)}\n"
            f"`{down_line(folder)}` takes it down; --dir gives a second one its own folder."
        )
    if find_processes(folder):
        gone = ", ".join(name for name, pid in now.daemons.items() if pid is None)
        raise UserError(
            f"The sandbox in {folder} is half up: {gone or 'its controller'} does not run. "
            f"`{down_line(folder)}` clears it away; then try again."
        )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise UserError(f"Another `samestep slurm sandbox` uses {folder}; wait for it.") from None
    finally:
        os.close(descriptor)
