"""`samestep slurm sandbox`: a real Slurm on this one machine, to learn and to test on."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import arg, subcommand

from samestep.commands.help import examples
from samestep.slurm.sandbox.cluster import Status, down, status, up
from samestep.slurm.sandbox.folder import default_folder, export_line

_EXAMPLES = """\
examples:
  samestep slurm sandbox up --nodes 2
  eval "$(samestep slurm sandbox up --nodes 2 --quiet)"; srun -N2 hostname
"""

_Folder = Annotated[Path | None, arg(metavar="DIR")]


@dataclass(frozen=True, kw_only=True)
class _Up:
    """Start a Slurm whose nodes are all this machine, and wait until it can run jobs."""

    nodes: Annotated[int, arg(metavar="N")] = 2
    """How many nodes it has."""

    cpus: Annotated[int | None, arg(metavar="C")] = None
    """CPUs that each node claims to have; without it the machine's, and at least 4."""

    dir: _Folder = None
    """The folder for its files; without it one in your state folder (~/.local/state)."""

    quiet: bool = False
    """Print nothing but the line to export, for `eval`."""


@dataclass(frozen=True, kw_only=True)
class _Status:
    """Show whether it is up, its nodes and daemons; exit code 0 if it is up, 1 if not."""

    dir: _Folder = None
    """The folder that was given to `up`."""


@dataclass(frozen=True, kw_only=True)
class _Down:
    """Cancel its jobs, stop its daemons, remove its files; also after a crash."""

    dir: _Folder = None
    """The folder that was given to `up`."""


def main(arguments: list[str]) -> int:
    """Run `samestep slurm sandbox` with the arguments after these words; return the exit code.

    Raises:
        UserError: It could not be brought up or taken down.
        SystemExit: The arguments are wrong (code 2), or help was asked for (code 0).
    """
    with examples(_EXAMPLES):
        command = tyro.cli(
            Annotated[_Up, subcommand(name="up")]
            | Annotated[_Status, subcommand(name="status")]
            | Annotated[_Down, subcommand(name="down")],
            prog="samestep slurm sandbox",
            description="A real Slurm on this one machine, as this user, to learn and to test on.",
            args=arguments,
        )
    folder = (command.dir or default_folder()).absolute().resolve()
    if isinstance(command, _Down):
        there = down(folder)
        _show(f"The sandbox in {folder} is down." if there else f"No sandbox is up in {folder}.")
        return 0
    if isinstance(command, _Status):
        now = status(folder)
        _show(_described(now))
        return 0 if now.is_up else 1
    now = up(folder, nodes=command.nodes, cpus=command.cpus)
    if not command.quiet:
        count = len(now.nodes)
        _show(f"A Slurm of {count} node{'s' * (count > 1)} is up. To use it, say:\n")
    _show(export_line(folder))
    if not command.quiet:
        where = f" --dir {shlex.quote(str(command.dir))}" if command.dir else ""
        _show(f"\nThen try `sinfo`, `srun -N{len(now.nodes)} hostname`. This ends it:")
        _show(f"samestep slurm sandbox down{where}")
    return 0


def _described(now: Status) -> str:
    if not now.is_up and now.num_job_processes == 0 and not any(now.daemons.values()):
        return f"No sandbox is up in {now.folder}."
    lines = [f"{'up' if now.is_up else 'half up: take it down'}\n"]
    for name, pid in now.daemons.items():
        runs = f"pid {pid}" if pid else "does not run"
        log = now.folder / "log" / f"{name}.log"
        lines.append(f"{name:<10} {now.nodes.get(name, ''):<10} {runs:<13} {log}")
    lines += [f"\nprocesses of jobs: {now.num_job_processes}\n", export_line(now.folder)]
    return "\n".join(lines)


def _show(text: str) -> None:
    sys.stdout.write(f"{text}\n")
