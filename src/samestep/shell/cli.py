"""The command line: find the verb, then import its module, so that help needs no torch."""

import contextlib
import os
import sys
import time

from samestep.base.errors import UserError, did_you_mean
from samestep.base.plugins import Names
from samestep.base.startup import (
    PARENT,
    accept_output,
    drop_output,
    hold_warning,
    postpone_collections,
)
from samestep.base.version import __version__

_STARTED_AT = time.time()

_OWN = {
    "demo": "see a run, killed and resumed on other ranks, end in the same bits",
    "new": "write a starter file: a recipe, or a loop of your own",
    "train": "train a recipe or a recipe file; with --resume, continue a run",
    "sweep": "train a recipe with many settings, several at a time",
    "explain": "show a training's batches, memory and learning rate before it runs",
    "evaluate": "evaluate a checkpoint of a run on one device",
    "predict": "run a trained model on files",
    "checkpoint": "list, verify and export the checkpoints of a run",
    "track": "send a run to Comet, MLflow, TensorBoard or Weights & Biases",
    "profile": "show where a recipe or script spends its time, and what to change",
    "verify": "check that training is the same on one rank and on several",
    "check": "run any distributed script, and report its mistakes",
    "runs": "list the runs in a folder: state, best metric, duration, curve",
    "compare": "compare runs: settings, speed, curves; is it the same training?",
    "report": "write a page about one or more runs: curves, classes, ranks",
    "watch": "show the report of a run in the browser while it trains",
    "scale": "measure 1, 2, 4 … ranks, and show where scaling loses time",
    "data": "download data sets, verified by hash",
    "doctor": "check this machine, or every node of an allocation",
    "completion": "print a completion script for bash, zsh or fish",
    "slurm": "submit, watch and stop jobs on a cluster; a sandbox to learn on",
}
VERBS = Names({verb: f"samestep.shell.commands.{verb}" for verb in _OWN}, "verbs")
"""Verb → its module, with `main(words) -> exit code`; those of installed packages, too."""

_HELP = """\
usage: samestep VERB …

Train a PyTorch model with one command, the same on a laptop and on a cluster.

verbs:
{verbs}

options:
  -h, --help   show this help; `samestep VERB --help` shows that of a verb
  --version    show the version

examples:
  samestep train spiral
  samestep train spiral --nproc 2
"""


def about(verb: str) -> str:
    """Return what a verb is for; of an installed package's, who brings it."""
    return _OWN.get(verb) or f"of the package {VERBS[verb].partition('.')[0]}"


def main(arguments: list[str] | None = None) -> int:
    """Run one verb and return the exit code: 0 done, 1 failed, 2 a user's mistake."""
    arguments = sys.argv[1:] if arguments is None else arguments
    accept_output()
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        verbs = "\n".join(f"  {verb:<12} {about(verb)}" for verb in VERBS)
        sys.stdout.write(_HELP.format(verbs=verbs))
        return 0 if arguments else 2
    verb, *rest = arguments
    if verb == "--version":
        sys.stdout.write(f"samestep {__version__}\n")
        return 0
    if PARENT not in os.environ:  # else it is for the command that started this rank
        os.environ["SAMESTEP_STARTED_AT"] = str(_STARTED_AT)
    # Waiting threads that spin take the core from the thread they wait for as soon as anything
    # else runs here: with one neighbour, a step took 4 to 6 times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    postpone_collections()
    if verb == "train":  # other verbs end by it at once
        hold_warning()
        _say_that_it_starts(rest)
    try:
        if verb not in VERBS:
            hint = did_you_mean(verb, VERBS)
            raise UserError(f"There is no verb {verb!r}. {hint}The verbs are: {', '.join(VERBS)}.")
        code: int = VERBS.load(verb).main(rest)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        drop_output()  # Python flushes once more at its end
        return 141
    except Exception as error:
        if isinstance(error, UserError):
            error.in_python = False  # a verb may have called a function of the package
        from samestep.launch.ranks.process import report  # noqa: PLC0415 - only when something has failed

        return report(error)
    return code


def _say_that_it_starts(words: list[str]) -> None:
    """Tell a terminal at once what will take seconds: PyTorch is imported first."""
    if PARENT in os.environ or {"-h", "--help", "--help-all"} & {*words}:
        return
    with contextlib.suppress(OSError, ValueError):  # a closed one
        if sys.stderr.isatty():
            at = words.index("--nproc") + 1 if "--nproc" in words else 0
            ranks = f"{words[at]} ranks " if 0 < at < len(words) and words[at] != "1" else ""
            sys.stderr.write(f"starting {ranks}…\n")
            sys.stderr.flush()
