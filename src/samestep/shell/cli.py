"""The command line: find the verb, then import its module, so that help needs no torch."""

import contextlib
import importlib
import os
import re
import sys
import time
from types import ModuleType

from samestep.base import startup
from samestep.base.errors import AlreadyTold, UserError, did_you_mean
from samestep.base.plugins import Names, __version__

_STARTED_AT = time.time()

# The verb, what a shell completes after it, and what it is for. A target is a recipe, file or run.
_TABLE = """\
demo                  none     see a run, killed and resumed on other ranks, end in the same bits
new                   word     write a starter file: a recipe, or a loop of your own
train                 recipe   train a recipe or a recipe file; with --resume, continue a run
sweep                 recipe   train a recipe with many settings, several at a time
explain               recipe   show a training's batches, memory and learning rate before it runs
evaluate              run      evaluate a checkpoint of a run on one device
predict               files    run a trained model on files
checkpoint            verb     list, verify and export the checkpoints of a run
checkpoint list       run      show the step, metric and size of each, and which is best and last
checkpoint verify     run      hash the files of every checkpoint, to find missing and damaged ones
checkpoint export     run      write a checkpoint's weights to a file for other programs
track                 run      send a run to Comet, MLflow, TensorBoard or Weights & Biases
profile               recipe   show where a recipe or script spends its time, and what to change
verify                recipe   check that training is the same on one rank and on several
check                 file     run any distributed script, and report its mistakes
runs                  folder   list the runs in a folder: state, best metric, duration, curve
compare               runs     compare runs: settings, speed, curves; is it the same training?
report                runs     write a page about one or more runs: curves, classes, ranks
watch                 run      show the report of a run in the browser while it trains
scale                 recipe   measure 1, 2, 4 … ranks, and show where scaling loses time
data                  verb     download data sets, verified by hash
data get              none     download a data set into a folder
data list             none     show the data sets with their size, licence and source
doctor                file     check this machine, or every node of an allocation
completion            word     print a completion script for bash, zsh or fish
slurm                 verb     submit, watch and stop jobs on a cluster; a sandbox to learn on
slurm submit          recipe   submit a recipe, a run or any script as a job
slurm status          run      show the job's state in the queue and the progress of the training
slurm logs            run      show what rank 0 printed, or any other rank
slurm cancel          run      save a checkpoint, then stop; with --now stop at once
slurm sandbox         verb     start a real Slurm on this machine, to learn and to test on
slurm sandbox up      none     start it, and wait until it can run jobs
slurm sandbox status  none     show whether it is up, with its nodes and daemons
slurm sandbox down    none     cancel its jobs, stop its daemons and remove its files
slurm verdict         hidden   say how a start of a job ended; job scripts call it
"""
_ROWS = [re.split(r"\s{2,}", row, maxsplit=2) for row in _TABLE.splitlines()]
OWN = {verb: (follows, about) for verb, follows, about in _ROWS}
"""samestep's own verbs, each with its group's → what follows it, and what it is for."""
VERBS = Names({verb: f"samestep.shell.commands.{verb}" for verb in OWN if " " not in verb}, "verbs")
"""Verb → its module, with `main(words) -> exit code`; those of installed packages, too."""

HELP_ALL = "--help-all"
HELP = frozenset({"-h", "--help", HELP_ALL})
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
    """Return a verb's purpose; for one of an installed package, that package."""
    return OWN[verb][1] if verb in OWN else f"of the package {VERBS[verb].partition('.')[0]}"


def module_of(verb: str) -> ModuleType:
    """Return the module of a verb of samestep's own; of Slurm's, each has one."""
    group, *inner = verb.split()
    place = ".".join([group, *inner[:1]]) if group == "slurm" else group
    return importlib.import_module(f"samestep.shell.commands.{place}")


def _run(verb: str, words: list[str]) -> int:
    """Run a verb, or that one of a group which is named next; return the exit code."""
    module = module_of(verb) if verb in OWN else VERBS.load(verb)
    if verb in OWN and OWN[verb][0] == "verb":
        return _run(*_inner_verb(verb, module, words))
    functions = [vars(module).get("main"), *vars(module).values()]
    declared = (f for f in functions if getattr(getattr(f, "form", None), "verb", None) == verb)
    code: int = next(declared, functions[0])(words)
    return code


def _inner_verb(group: str, module: ModuleType, words: list[str]) -> tuple[str, list[str]]:
    """Return the verb of a group that is meant, and the words after it.

    The module of the group has as its docstring what help says first, and `EXAMPLES`.
    """
    verbs = {verb: row for verb, row in OWN.items() if verb.rpartition(" ")[0] == group}
    texts = {
        verb.split()[-1]: text for verb, (follows, text) in verbs.items() if follows != "hidden"
    }
    width = max(map(len, texts)) + 3
    lines = "".join(f"  {name:<{width}}{text}\n" for name, text in texts.items())
    more = f"`samestep {group} VERB --help` shows the flags of a verb.\n\n"
    about = f"usage: samestep {group} VERB …\n\n{module.__doc__}\n\nverbs:\n{lines}\n{more}"
    show_general_help(words, about + example_text(*module.EXAMPLES))
    verb = f"{group} {words[0]}"
    if verb not in verbs:
        names = ", ".join(texts)
        raise UserError(f"samestep {group} has no verb {words[0]!r}. The verbs are: {names}.")
    return verb, words[1:]


def example_text(*lines: str) -> str:
    """Return the examples of a help text; lines without `samestep` get it as a prefix."""
    whole = (line if "samestep " in line else f"samestep {line}" for line in lines)
    return "examples:\n" + "".join(f"  {line}\n" for line in whole)


def show_general_help(arguments: list[str], text: str) -> None:
    """Print a verb's help and end if there are no arguments or the first asks for help."""
    if not arguments or arguments[0] in HELP:
        show(text)
        raise AlreadyTold(0 if arguments else 2)


def show(text: str) -> None:
    """Print a help text."""
    sys.stdout.write(text)
    sys.stdout.flush()  # the reader may have left, as `head` does


def _typed() -> list[str]:
    """Return the command's words, where this process is its own and no caller's."""
    startup.hear_interrupts()
    return sys.argv[1:]


def main(arguments: list[str] | None = None) -> int:
    """Run one verb and return the exit code: 0 done, 1 failed, 2 a user's mistake."""
    arguments = _typed() if arguments is None else arguments
    startup.accept_output()
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        verbs = "\n".join(f"  {verb:<12} {about(verb)}" for verb in VERBS)
        sys.stdout.write(_HELP.format(verbs=verbs))
        return 0 if arguments else 2
    verb, *rest = arguments
    if verb == "--version":
        sys.stdout.write(f"samestep {__version__}\n")
        return 0
    if startup.PARENT not in os.environ:  # else it is for the command that started this rank
        os.environ["SAMESTEP_STARTED_AT"] = str(_STARTED_AT)
    # Waiting threads that spin take the core from the thread they wait for as soon as anything
    # else runs here: with one neighbour, a step took 4 to 6 times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    startup.postpone_collections()
    if verb == "train":  # other verbs end by it at once
        startup.hold_warning()
        _say_that_it_starts(rest)
    try:
        if verb not in VERBS:
            hint = did_you_mean(verb, VERBS)
            raise UserError(f"There is no verb {verb!r}. {hint}The verbs are: {', '.join(VERBS)}.")
        code = _run(verb, rest)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        startup.drop_output()  # Python flushes once more at its end
        return 141
    except Exception as error:
        if isinstance(error, UserError):
            error.in_python = False  # a verb may have called a function of the package
        from samestep.launch.ranks.process import report  # noqa: PLC0415 - only when something has failed

        return report(error)
    return code


def _say_that_it_starts(words: list[str]) -> None:
    """Tell a terminal at once what will take seconds: PyTorch is imported first."""
    if startup.PARENT in os.environ or {"-h", "--help", "--help-all"} & {*words}:
        return
    with contextlib.suppress(OSError, ValueError):  # a closed one
        if sys.stderr.isatty():
            at = words.index("--nproc") + 1 if "--nproc" in words else 0
            ranks = f"{words[at]} ranks " if 0 < at < len(words) and words[at] != "1" else ""
            sys.stderr.write(f"starting {ranks}…\n")
            sys.stderr.flush()
