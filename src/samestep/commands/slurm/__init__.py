"""`samestep slurm`: submit, watch and stop jobs; a sandbox to learn on. A file each."""

import importlib

from samestep.commands.help import show_general_help
from samestep.errors import UserError

VERBS = {
    "submit": "submit a recipe, a run or any script as a job",
    "status": "the queue's state and the training's, side by side",
    "logs": "rank 0's screen, or any rank's log",
    "cancel": "save a checkpoint, then stop; --now at once",
    "sandbox": "a real Slurm on this machine, to learn and to test on",
}

_HELP = """\
usage: samestep slurm VERB …

Run the training as a job that outlives time limits, preemption and failed nodes.

verbs:
{verbs}

examples:
  samestep slurm submit spiral --nodes 2 --ntasks-per-node 4 --time 02:00:00 -- --epochs 50
  samestep slurm status
"""


def main(arguments: list[str]) -> int:
    """Run one of the verbs."""
    verbs = "\n".join(f"  {verb:<9} {what}" for verb, what in VERBS.items())
    show_general_help(arguments, _HELP.format(verbs=verbs))
    verb, *rest = arguments
    if verb not in VERBS and verb != "verdict":  # job scripts call it; not for typing
        raise UserError(f"samestep slurm has no verb {verb!r}. The verbs are: {', '.join(VERBS)}.")
    code: int = importlib.import_module(f"samestep.commands.slurm.{verb}").main(rest)
    return code
