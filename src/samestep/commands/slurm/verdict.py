"""`samestep slurm verdict`: job scripts call it when their ranks have ended."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from samestep.commands.help import RunPath
from samestep.ranks.watched import STALLED
from samestep.slurm.restarts import decide, go_on_command, read_ending, read_restarts, settle


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


def main(arguments: list[str]) -> int:
    """Run the verb."""
    command = tyro.cli(_Verdict, prog="samestep slurm verdict", args=arguments)
    number = int(os.environ.get("SLURM_JOB_ID", "0"))
    try:  # the job's log is this process's standard error: no controller is asked
        log = Path("/proc/self/fd/2").readlink()
    except OSError:
        log = None
    ending = read_ending(
        command.run, code=command.code, told=command.told, kind=command.kind, log=log
    )
    before = read_restarts(command.run, number)
    go_on = go_on_command(command.run)
    verdict = decide(ending, before, command.restarts, requeue=command.requeue, go_on=go_on)
    settle(command.run, verdict, ending)
    if ending.frames and verdict.word in ("again", "failed"):
        sys.stderr.write("\n".join(["The first failure:", ending.why, *ending.frames, ""]))
    sys.stderr.write(f"samestep: {verdict.text}\n")
    sys.stderr.flush()
    hung = verdict.word == "failed" and ending.code == STALLED
    sys.stdout.write(f"{'hung' if hung else verdict.word}\n")
    return 0
