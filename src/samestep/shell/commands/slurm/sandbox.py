"""`samestep slurm sandbox`: a real Slurm on this one machine, to learn and to test on."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from samestep.cluster.slurm import sandbox_cluster as cluster
from samestep.cluster.slurm.sandbox_cluster import default_folder, down_line, export_line
from samestep.shell.commands.help import Switch, inner_verb, parse_flags

_EXAMPLES = (
    "slurm sandbox up --nodes 2",
    'eval "$(samestep slurm sandbox up --nodes 2 --quiet)"; srun -N2 hostname',
    "slurm sandbox down",
)
_ABOUT = "Run a real Slurm on this one machine, as your own user, to learn and to test on."
_VERBS = {
    "up": "start it, and wait until it can run jobs",
    "status": "show whether it is up, with its nodes and daemons",
    "down": "cancel its jobs, stop its daemons and remove its files",
}


@dataclass(frozen=True, kw_only=True)
class SandboxUp:
    """Start a Slurm whose nodes are all this machine, and wait until it can run jobs."""

    nodes: int = 2
    """Number of nodes."""
    cpus: int | None = None
    """CPUs that each node reports; by default those of this machine, and at least 4."""
    dir: Annotated[Path | None, arg(metavar="DIR")] = None
    """Folder for its files; by default one in your state folder (~/.local/state)."""
    quiet: Switch = False
    """Print only the line to export, for `eval`."""


@dataclass(frozen=True, kw_only=True)
class SandboxStatus:
    """Show whether the sandbox is up, with its nodes and daemons.

    The exit code is 0 if it is up, and 1 if it is not.
    """

    dir: Annotated[Path | None, arg(metavar="DIR")] = None
    """Folder that was passed to `up`."""


@dataclass(frozen=True, kw_only=True)
class SandboxDown:
    """Cancel the sandbox's jobs, stop its daemons and remove its files, also after a crash."""

    dir: Annotated[Path | None, arg(metavar="DIR")] = None
    """Folder that was passed to `up`."""


def main(arguments: list[str]) -> int:
    """Run the verb."""
    verb, flags = inner_verb("slurm sandbox", _ABOUT, _VERBS, arguments, *_EXAMPLES)
    if verb == "up":
        return _up(parse_flags(SandboxUp, "slurm sandbox up", flags, *_EXAMPLES))
    if verb == "status":
        return _status(parse_flags(SandboxStatus, "slurm sandbox status", flags, *_EXAMPLES).dir)
    return _down(parse_flags(SandboxDown, "slurm sandbox down", flags, *_EXAMPLES).dir)


def _up(command: SandboxUp) -> int:
    nodes, folder = command.nodes, command.dir or default_folder()
    now = cluster.up(folder, nodes=nodes, cpus=command.cpus)
    line = export_line(now.folder)
    if command.quiet:
        _show(line)
        return 0
    _show(
        f"A Slurm of {nodes} node{'s' * (nodes > 1)} is up. To use it, say:\n\n{line}\n\n"
        f"Then try `sinfo`, `srun -N{nodes} hostname`. This ends it:\n" + down_line(folder)
    )
    return 0


def _status(folder: Path | None) -> int:
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


def _down(folder: Path | None) -> int:
    folder = (folder or default_folder()).absolute().resolve()
    was_there = cluster.down(folder)
    _show(f"The sandbox in {folder} is down." if was_there else f"No sandbox is up in {folder}.")
    if os.environ.get("SLURM_CONF") == str(folder / "slurm.conf"):
        _show("This shell still looks for it; say: unset SLURM_CONF")
    return 0


def _show(text: str) -> None:
    sys.stdout.write(f"{text}\n")
