"""`samestep slurm cancel`: save a checkpoint, then stop."""

import contextlib
import sys
from typing import Annotated

from samestep.base.errors import UserError
from samestep.base.flags import InShell
from samestep.cluster.slurm.options import UncheckedOptions, kept_options
from samestep.cluster.slurm.queue import ProgramError, QueuedJob, ask_to_stop, call, find_job_or_run
from samestep.cluster.slurm.restarts import go_on_command
from samestep.shell.commands.forms import verb


@verb("slurm cancel", "slurm cancel 1234", "slurm cancel runs/ID --now")
def main(job: Annotated[str, InShell("JOB|RUN")], *, now: bool = False) -> int:
    """Stop a job: its ranks finish their step, save a checkpoint, and end.

    Ranks that hang are killed.

    Args:
        job: Number of the job, or directory of the run.
        now: Stop at once; what was trained since the newest checkpoint is lost.
    """
    queued = find_job_or_run(job)
    if queued.queue_error is not None:
        raise queued.queue_error
    if queued.job is None:
        raise UserError(f"Slurm has no job of yours for {job}: there is nothing to cancel.")
    if queued.job.ended:
        raise UserError(f"{job} has already ended ({queued.job.state}): nothing to cancel.")
    return _cancel(queued.job, now=now)


def _cancel(job: QueuedJob, *, now: bool) -> int:
    if job.run is None or job.state != "RUNNING":
        call("scancel", job.target)
        sys.stdout.write(f"Job {job.target} is cancelled.\n")
        return 0
    if not ask_to_stop(job, job.run):
        sys.stderr.write(f"Job {job.target} had not reported its start; the signal was sent.\n")
    if now:  # plain scancel gives the ranks half a minute
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
