"""`samestep slurm`: submit, watch and stop jobs; a sandbox to learn on. A file each."""

import importlib

from samestep.shell.commands.help import inner_verb

VERBS = {
    "submit": "submit a recipe, a run or any script as a job",
    "status": "show the job's state in the queue and the progress of the training",
    "logs": "show what rank 0 printed, or any other rank",
    "cancel": "save a checkpoint, then stop; with --now stop at once",
    "sandbox": "start a real Slurm on this machine, to learn and to test on",
}
_ABOUT = "Train in jobs that outlive time limits, preemption and failed nodes."
_EXAMPLES = (
    "slurm submit spiral --nodes 2 --ntasks-per-node 4 --time 02:00:00 -- --epochs 50",
    "slurm status",
)


def main(arguments: list[str]) -> int:
    """Run one of the verbs."""
    verb, rest = "verdict", arguments[1:]  # job scripts call it; not for typing
    if arguments[:1] != [verb]:
        verb, rest = inner_verb("slurm", _ABOUT, VERBS, arguments, *_EXAMPLES)
    code: int = importlib.import_module(f"samestep.shell.commands.slurm.{verb}").main(rest)
    return code
