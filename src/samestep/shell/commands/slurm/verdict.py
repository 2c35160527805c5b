"""`samestep slurm verdict`: job scripts call it when their ranks have ended."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from samestep.base.errors import UserError
from samestep.cluster.slurm.preflight import NOT_PASSED
from samestep.cluster.slurm.queue import exclusion, find_job
from samestep.cluster.slurm.restarts import (
    decide,
    failed_twice,
    go_on_command,
    read_ending,
    read_restarts,
    requeued,
    settle,
    with_failures,
)
from samestep.launch.ranks.watched import STALLED
from samestep.shell.commands.help import RunPath


@dataclass(frozen=True, kw_only=True)
class _Verdict:
    """Say how a start of a job ended: one word on standard output, one line for the log."""

    run: RunPath
    """The run directory."""
    code: int
    """Exit code of srun."""
    told: str = ""
    """The signal that the script received; LATE if it killed ranks that did not end."""
    kind: str = "recipe"
    """recipe or script."""
    restarts: int = 2
    """Restarts in a row without a newer checkpoint after which the job gives up."""
    requeue: bool = True
    """Whether the job may start again."""
    exclude: bool = False
    """Whether the script excludes the nodes that follow the word `again`."""


def main(arguments: list[str]) -> int:
    """Run the verb."""
    command = tyro.cli(_Verdict, prog="samestep slurm verdict", args=arguments)
    number = int(os.environ.get("SLURM_JOB_ID", "0"))
    try:  # the job's log is this process's standard error: no controller is asked
        log = Path("/proc/self/fd/2").readlink()
    except OSError:
        log = None
    ending = read_ending(
        command.run,
        code=command.code,
        told=command.told,
        kind=command.kind,
        log=log,
        first_node=os.environ.get("SLURMD_NODENAME", ""),
        num_nodes=int(os.environ.get("SLURM_JOB_NUM_NODES", "1")),
    )
    before = with_failures(read_restarts(command.run, number), ending)
    without, exclude = failed_twice(before) if command.exclude else (), ""
    if without:
        try:
            exclude = exclusion(_job(), without)
        except UserError as error:  # Slurm would look for nodes for ever
            said = " ".join(getattr(error, "said", str(error)).split())
            nodes = ", ".join(without)
            sys.stderr.write(f"samestep: {nodes} failed this job and is not excluded: {said}\n")
    if command.kind == "script" and command.told in ("USR1", "TERM") and _is_requeued():
        verdict = requeued(before)
    else:
        verdict = decide(
            ending,
            before,
            command.restarts,
            requeue=command.requeue,
            go_on=go_on_command(command.run),
            without=without if exclude else (),
        )
    settle(command.run, verdict, ending)
    if ending.frames and verdict.word in ("again", "failed"):
        head = ["The first failure:", ending.why] if ending.told != NOT_PASSED else ["What to do:"]
        sys.stderr.write("\n".join([*head, *ending.frames, ""]))
    sys.stderr.write(f"samestep: {verdict.text}\n")
    sys.stderr.flush()
    hung = verdict.word == "failed" and ending.code == STALLED
    follows = f" {exclude}" if exclude and verdict.word == "again" else ""
    sys.stdout.write(f"{'hung' if hung else verdict.word}{follows}\n")
    return 0


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
