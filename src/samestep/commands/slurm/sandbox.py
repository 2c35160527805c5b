"""`samestep slurm sandbox`: a real Slurm on this one machine, to learn and to test on."""

import os
import sys
from pathlib import Path
from typing import Annotated

from tyro.conf import arg
from tyro.extras import subcommand_cli_from_dict

from samestep.commands.help import examples
from samestep.slurm import sandbox_cluster as cluster
from samestep.slurm.sandbox_cluster import default_folder, down_line, export_line

_EXAMPLES = (
    "slurm sandbox up --nodes 2",
    'eval "$(samestep slurm sandbox up --nodes 2 --quiet)"; srun -N2 hostname',
)

_Folder = Annotated[Path | None, arg(name="dir", metavar="DIR")]


def main(arguments: list[str]) -> int:
    """Run the verb."""
    with examples(*_EXAMPLES):
        code: int = subcommand_cli_from_dict(
            {"up": _up, "status": _status, "down": _down},
            prog="samestep slurm sandbox",
            description="A real Slurm on this one machine, as this user, to learn and to test on.",
            args=arguments,
        )
    return code


def _up(
    nodes: Annotated[int, arg(metavar="N")] = 2,
    cpus: Annotated[int | None, arg(metavar="C")] = None,
    folder: _Folder = None,
    quiet: bool = False,
) -> int:
    """Start a Slurm whose nodes are all this machine, and wait until it can run jobs.

    Args:
        nodes: How many nodes it has.
        cpus: CPUs that each node claims to have; without it the machine's, and at least 4.
        folder: The folder for its files; without it one in your state folder (~/.local/state).
        quiet: Print nothing but the line to export, for `eval`.
    """
    now = cluster.up(folder or default_folder(), nodes=nodes, cpus=cpus)
    line = export_line(now.folder)
    if quiet:
        _show(line)
        return 0
    _show(
        f"A Slurm of {nodes} node{'s' * (nodes > 1)} is up. To use it, say:\n\n{line}\n\n"
        f"Then try `sinfo`, `srun -N{nodes} hostname`. This ends it:\n"
        + down_line(folder or default_folder())
    )
    return 0


def _status(folder: _Folder = None) -> int:
    """Show whether it is up, its nodes and daemons; exit code 0 if it is up, 1 if not.

    Args:
        folder: The folder that was given to `up`.
    """
    now = cluster.status(folder or default_folder())
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


def _down(folder: _Folder = None) -> int:
    """Cancel its jobs, stop its daemons, remove its files; also after a crash.

    Args:
        folder: The folder that was given to `up`.
    """
    folder = (folder or default_folder()).absolute().resolve()
    was_there = cluster.down(folder)
    _show(f"The sandbox in {folder} is down." if was_there else f"No sandbox is up in {folder}.")
    if os.environ.get("SLURM_CONF") == str(folder / "slurm.conf"):
        _show("This shell still looks for it; say: unset SLURM_CONF")
    return 0


def _show(text: str) -> None:
    sys.stdout.write(f"{text}\n")
