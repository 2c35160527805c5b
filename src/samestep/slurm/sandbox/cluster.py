"""Bring a sandbox up, look at it, take it down."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from samestep.errors import UserError
from samestep.slurm.sandbox import daemons
from samestep.slurm.sandbox import folder as files
from samestep.slurm.sandbox.conf import check_folder, node_names, nodes_of
from samestep.slurm.sandbox.processes import end, find_processes, wait_until

_IDLE_WITHIN_S = 30.0
_TERM_WITHIN_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Status:
    """What there is of a sandbox."""

    folder: Path
    daemons: dict[str, int | None]
    """The process id of each daemon that should run, by its name; None if it does not run."""
    nodes: dict[str, str]
    """The state of each node, as `sinfo` names it; empty if the controller does not answer."""
    num_job_processes: int
    """slurmstepd's included."""

    @property
    def is_up(self) -> bool:
        """Whether all daemons run and the controller answers."""
        return bool(self.nodes) and None not in self.daemons.values()


def up(folder: Path, *, nodes: int, cpus: int | None = None, first_job: int = 1) -> Status:
    """Start a Slurm of some nodes, all on this machine, and wait until every node is idle.

    Its folder is made, and readable by this user only. Each node claims to have that many CPUs,
    whatever the machine has; by default the machine's, and at least 4. Jobs take their ports by
    their numbers, so two sandboxes that are to run jobs at the same time need other first ones.

    Raises:
        UserError: it is up already, or something that it needs is not there.
        DaemonError: it did not come up; nothing is left running.
    """
    folder = folder.absolute().resolve()
    cpus = max(4, os.cpu_count() or 1) if cpus is None else cpus
    if nodes < 1 or cpus < 1:
        raise UserError("A sandbox has at least one node (--nodes 1) of one CPU (--cpus 1).")
    if missing := daemons.missing_programs():
        raise UserError(
            f"A sandbox needs programs that are not here: {', '.join(missing)}. On Debian "
            "or Ubuntu, `apt install slurm-wlm munge` installs them; nothing needs to be set up."
        )
    check_folder(folder, nodes=nodes)
    files.make_folder(folder)
    with _locked(folder):
        _refuse_if_up(folder)
        files.remove_files(folder)
        files.write_files(folder, nodes=nodes, cpus=cpus, first_job=first_job)
        try:
            _start(folder, node_names(nodes))
        except BaseException:  # also when the user has lost patience
            _end_all(folder)
            raise
        return status(folder)


def status(folder: Path) -> Status:
    """Return what there is of the sandbox in a folder."""
    folder = folder.absolute().resolve()
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
    """Cancel all jobs, stop all daemons, and remove the sandbox's files, also of one that crashed.

    It returns whether there was anything to take down.

    Raises:
        UserError: a process could not be ended, or the folder is another user's.
    """
    folder = folder.absolute().resolve()
    try:
        is_there = folder.is_dir()
    except PermissionError:
        raise UserError(f"{folder} cannot be looked into: it is another user's.") from None
    if not is_there:
        return _end_all(folder)
    with _locked(folder):
        was_there = _end_all(folder)
        if not files.is_sandbox(folder):
            return was_there
        files.remove_files(folder)
        if not any(folder.iterdir()):
            folder.rmdir()
    return True


def _start(folder: Path, nodes: list[str]) -> None:
    for daemon in ("munged", "slurmctld", *nodes):
        daemons.start(folder, daemon)
    idle = dict.fromkeys(nodes, "idle")
    if not wait_until(lambda: daemons.node_states(folder) == idle, _IDLE_WITHIN_S):
        states = daemons.node_states(folder)
        guilty = next((node for node in nodes if states.get(node) != "idle"), "slurmctld")
        state = states.get(guilty, "unknown")
        raise daemons.DaemonError(folder, guilty, f"{guilty} is not idle but {state}")


def _end_all(folder: Path) -> bool:
    """End all processes of the sandbox; return whether there were any."""
    found = find_processes(folder)
    if not found:
        return False
    if {process.part for process in found if process.is_daemon} >= {"munged", "slurmctld"}:
        # Those who wait for a job hear from Slurm that it is over.
        jobs = daemons.ask(folder, "squeue", "--noheader", "--format=%A")
        if jobs and jobs.split():
            daemons.ask(folder, "scancel", "--quiet", *jobs.split())
            wait_until(
                lambda: not any(one.is_of_job for one in find_processes(folder)), _TERM_WITHIN_S
            )
    if rest := end(lambda: find_processes(folder), _TERM_WITHIN_S):
        names = ", ".join(f"{process.name} ({process.pid})" for process in rest)
        raise UserError(f"These processes of the sandbox in {folder} do not end: {names}.")
    return True


def _refuse_if_up(folder: Path) -> None:
    now = status(folder)
    if now.is_up:
        raise UserError(
            f"A sandbox of {len(now.nodes)} nodes is up already in {folder}. To use it:\n"
            f"{files.export_line(folder)}\n"
            f"`{files.down_line(folder)}` takes it down; --dir gives a second one its own folder."
        )
    if find_processes(folder):
        gone = ", ".join(name for name, pid in now.daemons.items() if pid is None)
        raise UserError(
            f"The sandbox in {folder} is half up: {gone or 'its controller'} does not run. "
            f"`{files.down_line(folder)}` clears it away; then try again."
        )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise UserError(
            f"Another `samestep slurm sandbox` is at work in {folder}; wait for it to end."
        ) from None
    finally:
        os.close(descriptor)
