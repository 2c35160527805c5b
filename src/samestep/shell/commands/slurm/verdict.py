"""`samestep slurm verdict`: job scripts call it when their ranks have ended."""

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

from samestep.base.errors import UserError
from samestep.base.flags import InShell
from samestep.cluster.slurm import restarts as starts
from samestep.cluster.slurm.queue import exclusion, find_job
from samestep.launch.ranks.watched import STALLED
from samestep.shell.commands.forms import verb


@verb("slurm verdict")
def main(
    run: Annotated[Path, InShell("RUN")],
    *,
    code: int,
    told: str = "",
    kind: str = "recipe",
    restarts: int = 2,
    requeue: bool = True,
    exclude: bool = False,
) -> int:
    """Say how a start of a job ended: one word on standard output, one line for the log.

    Args:
        run: The run directory.
        code: Exit code of srun.
        told: The signal that the script received; LATE if it killed ranks that did not end.
        kind: recipe or script.
        restarts: Restarts in a row without a newer checkpoint after which the job gives up.
        requeue: Whether the job may start again.
        exclude: Whether the script excludes the nodes that follow the word `again`.
    """
    number = int(os.environ.get("SLURM_JOB_ID", "0"))
    # Ranks that got it too have ended by it: there is no time to ask a controller then.
    if told == "TERM" and code != 128 + signal.SIGTERM and _is_running():
        told = ""  # somebody's own signal, only to the script, maybe long ago
    try:  # the job's log is this process's standard error: no controller is asked
        log = Path("/proc/self/fd/2").readlink()
    except OSError:
        log = None
    ending = starts.read_ending(
        run,
        code=code,
        received=told,
        kind=kind,
        log=log,
        first_node=os.environ.get("SLURMD_NODENAME", ""),
        num_nodes=int(os.environ.get("SLURM_JOB_NUM_NODES", "1")),
    )
    before = starts.with_failures(starts.read_restarts(run, number), ending)
    without = starts.failed_twice(before) if exclude else ()
    excluded = ""
    if without:
        try:
            excluded = exclusion(_job(), without)
        except UserError as error:  # Slurm would look for nodes for ever
            message = " ".join(getattr(error, "said", str(error)).split())
            nodes = ", ".join(without)
            sys.stderr.write(f"samestep: {nodes} failed this job and is not excluded: {message}\n")
    if kind == "script" and told in ("USR1", "TERM") and _is_requeued():
        verdict = starts.requeued(before)
    else:
        verdict = starts.decide(
            ending,
            before,
            restarts,
            requeue=requeue,
            go_on=starts.go_on_command(run),
            without=without if excluded else (),
        )
    starts.settle(run, verdict, ending)
    if ending.frames and verdict.word in ("again", "failed"):
        head = ["The first failure:", ending.why]
        if ending.received == starts.NOT_PASSED:
            head = ["What to do:"]
        sys.stderr.write("\n".join([*head, *ending.frames, ""]))
    sys.stderr.write(f"samestep: {verdict.text}\n")
    sys.stderr.flush()
    hung = verdict.word == "failed" and ending.code == STALLED
    follows = f" {excluded}" if excluded and verdict.word == "again" else ""
    sys.stdout.write(f"{'hung' if hung else verdict.word}{follows}\n")
    return 0


def _is_running() -> bool:
    """Whether Slurm lets this job run on: of one that it ends, the state is another."""
    try:
        job = find_job(_job())
    except UserError:  # a controller that does not answer
        return False
    return job is not None and job.state == "RUNNING"


def _is_requeued() -> bool:
    """Whether Slurm counts another restart of this job already: Lightning asks for its own."""
    try:
        job = find_job(_job())
    except UserError:  # a controller that does not answer
        return False
    return job is not None and job.restarts > int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def _job() -> str:
    """Return the id for Slurm's commands: in a job array, the plain id may mean every task."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]
