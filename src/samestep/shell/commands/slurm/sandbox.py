"""Run a real Slurm on this one machine, as your own user, to learn and to test on."""

import os
import sys
from pathlib import Path
from typing import Annotated

from samestep.base.flags import InShell
from samestep.base.words import count
from samestep.cluster.slurm import sandbox_cluster as cluster
from samestep.cluster.slurm.sandbox_cluster import default_folder, down_line, export_line
from samestep.shell.commands.forms import verb

EXAMPLES = (
    "slurm sandbox up --nodes 2",
    'eval "$(samestep slurm sandbox up --nodes 2 --quiet)"; srun -N2 hostname',
    "slurm sandbox down",
)
Folder = Annotated[Path | None, InShell("DIR")]


@verb("slurm sandbox up", *EXAMPLES)
def up(
    *,
    nodes: int = 2,
    cpus: int | None = None,
    dir: Folder = None,  # noqa: A002 - the flag
    quiet: bool = False,
) -> int:
    """Start a Slurm whose nodes are all this machine, and wait until it can run jobs.

    Args:
        nodes: Number of nodes.
        cpus: CPUs that each node reports; by default those of this machine, and at least 4.
        dir: Folder for its files; by default one in your state folder (~/.local/state).
        quiet: Print only the line to export, for `eval`.
    """
    folder = dir or default_folder()
    line = export_line(cluster.up(folder, nodes=nodes, cpus=cpus).folder)
    if quiet:
        _show(line)
        return 0
    _show(
        f"A Slurm of {count(nodes, 'node')} is up. To use it, run:\n\n{line}\n\n"
        f"Then try `sinfo`, `srun -N{nodes} hostname`. To stop it:\n" + down_line(folder)
    )
    return 0


@verb("slurm sandbox status", *EXAMPLES)
def status(*, dir: Folder = None) -> int:  # noqa: A002 - the flag
    """Show whether the sandbox is up, with its nodes and daemons.

    The exit code is 0 if it is up, and 1 if it is not.

    Args:
        dir: Folder that was passed to `up`.
    """
    now = cluster.status(dir or default_folder())
    if not now.is_up and now.num_job_processes == 0 and not any(now.daemons.values()):
        _show(f"No sandbox is up in {now.folder}.")
        return 1
    _show(f"{'up' if now.is_up else 'half up: take it down'}\n")
    for name, pid in now.daemons.items():
        runs = f"pid {pid}" if pid else "does not run"
        log = now.folder / "log" / f"{name}.log"
        _show(f"{name:<10} {now.nodes.get(name, ''):<10} {runs:<13} {log}")
    _show(f"\nprocesses of jobs: {now.num_job_processes}\n\n{export_line(now.folder)}")
    return 0 if now.is_up else 1


@verb("slurm sandbox down", *EXAMPLES)
def down(*, dir: Folder = None) -> int:  # noqa: A002 - the flag
    """Cancel the sandbox's jobs, stop its daemons and remove its files, also after a crash.

    Args:
        dir: Folder that was passed to `up`.
    """
    folder = (dir or default_folder()).absolute().resolve()
    was_there = cluster.down(folder)
    _show(f"The sandbox in {folder} is down." if was_there else f"No sandbox is up in {folder}.")
    if os.environ.get("SLURM_CONF") == str(folder / "slurm.conf"):
        _show("This shell still points to it; run: unset SLURM_CONF")
    return 0


def _show(text: str) -> None:
    sys.stdout.write(f"{text}\n")
