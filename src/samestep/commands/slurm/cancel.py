"""`samestep slurm cancel`: save a checkpoint, then stop."""

import sys
from dataclasses import dataclass
from typing import Annotated

import tyro
from tyro.conf import FlagCreatePairsOff, Positional, arg

from samestep.errors import UserError
from samestep.slurm.queue import find
from samestep.slurm.tools import call

_EXAMPLES = """
examples:
  samestep slurm cancel 1234
  samestep slurm cancel runs/ID --now
"""


@dataclass(frozen=True, kw_only=True)
class Command:
    """Stop a job: its ranks finish their step, save a checkpoint, and end."""

    job: Annotated[Positional[str], arg(metavar="JOB|RUN")]
    """The job's number, or the run directory."""
    now: Annotated[bool, FlagCreatePairsOff] = False
    """Stop at once; the newest announced checkpoint is what is left."""


def main(arguments: list[str]) -> int:
    """Run the verb."""
    try:
        command = tyro.cli(Command, prog="samestep slurm cancel", args=arguments)
    except SystemExit as stop:
        if not stop.code:
            sys.stdout.write(_EXAMPLES)
        raise
    job, run = find(command.job)
    if job is None or job.ended:
        state = f" ({job.state})" if job else ""
        raise UserError(f"{command.job} has already ended{state}: there is nothing to cancel.")
    if command.now or job.run is None or job.state != "RUNNING":
        kill = ("--full", "--signal=KILL") if job.state == "RUNNING" and command.now else ()
        call("scancel", *kill, str(job.job))
        sys.stdout.write(f"Job {job.job} is cancelled.\n")
        return 0
    # To the script alone: it tells the ranks, waits for them, and does not start again.
    call("scancel", "--batch", "--signal=USR2", str(job.job))
    sys.stdout.write(f"Job {job.job} saves and stops; go on later with: "
                     f"samestep slurm submit {run}\n")  # fmt: skip
    return 0
