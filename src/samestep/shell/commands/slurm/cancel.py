"""`samestep slurm cancel`: save a checkpoint, then stop."""

import contextlib
import sys
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from samestep.base.errors import UserError
from samestep.cluster.slurm.options import UncheckedOptions, kept_options
from samestep.cluster.slurm.queue import ProgramError, ask_to_stop, call, find_job_or_run
from samestep.cluster.slurm.restarts import go_on_command
from samestep.shell.commands.help import Switch, parse_flags

_EXAMPLES = ("slurm cancel 1234", "slurm cancel runs/ID --now")


@dataclass(frozen=True, kw_only=True)
class _Cancel:
    """Stop a job: its ranks finish their step, save a checkpoint, and end.

    Ranks that hang are killed.
    """

    job: Annotated[Positional[str], arg(metavar="JOB|RUN")]
    """Number of the job, or directory of the run."""
    now: Switch = False
    """Stop at once; what was trained since the newest checkpoint is lost."""


def main(arguments: list[str]) -> int:
    """Run the verb."""
    command = parse_flags(_Cancel, "slurm cancel", arguments, *_EXAMPLES)
    found = find_job_or_run(command.job)
    job = found.job
    if found.queue_error is not None:
        raise found.queue_error
    if job is None:
        raise UserError(f"Slurm has no job of yours for {command.job}: there is nothing to cancel.")
    if job.ended:
        raise UserError(
            f"{command.job} has already ended ({job.state}): there is nothing to cancel."
        )
    if job.run is None or job.state != "RUNNING":
        call("scancel", job.target)
        sys.stdout.write(f"Job {job.target} is cancelled.\n")
        return 0
    if not ask_to_stop(job, job.run):
        sys.stderr.write(
            f"Job {job.target} had not reported its start yet; the signal was sent anyway.\n"
        )
    if command.now:  # plain scancel gives the ranks half a minute
        with contextlib.suppress(ProgramError):  # the ranks may have ended by themselves
            steps = range((kept_options(job.run) or UncheckedOptions()).num_steps)
            call("scancel", "--signal=KILL", *(f"{job.target}.{number}" for number in steps))
        sys.stdout.write(f"Job {job.target} is cancelled.\n")
        return 0
    again = go_on_command(job.run)
    patience = (kept_options(job.run) or UncheckedOptions()).signal_s
    sys.stdout.write(
        f"Job {job.target} saves and stops; ranks that hang are killed after {patience} s (--now: "
        f"at once).\nContinue later with: {again}\n"
    )
    return 0
