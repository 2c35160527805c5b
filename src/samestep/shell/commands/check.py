"""`samestep check`: what is wrong with anyone's distributed script, found while it runs."""

import json
import shutil
import sys
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console

from samestep.base.errors import AlreadyTold, UserError
from samestep.base.file_kinds import is_recipe_file, loop_of
from samestep.base.words import count
from samestep.core.recipes import RECIPES
from samestep.launch.ranks.nproc import check_ranks, refuse_inside_launcher
from samestep.launch.ranks.process import run_as_rank
from samestep.shell.commands.help import MaybeNumbers, Switch, check_positive, numbers, parse_flags
from samestep.shell.commands.script_target import ScriptTarget, script_target, target_first

if TYPE_CHECKING:
    from samestep.scripts.checking.check_report import CheckReport

_EXAMPLES = (
    "check train.py -- --epochs 1",
    'check --resume "--resume-from out/last.pt" train.py -- --epochs 3',
    "check --list SS104",
)
_MOST_COLUMNS = 100
_DEFAULT_RANKS, _DEFAULT_STEPS = 2, 10


@dataclass(frozen=True, kw_only=True)
class CheckFlags:
    """Run a training script on a few CPU ranks, and report what is wrong with it.

    The script runs unchanged, in a copy of its folder, for some steps of two epochs. To check a
    module, name it as for Python: samestep check -m MODULE. Arguments after `--` are passed to the
    script.

    A minute does not show what begins later, what only a GPU does, or what you mean. The report
    lists the rules that had too little to judge by.

    Exit codes: 0 at most advice, 1 something is wrong, 2 the script could not be checked.
    """

    nproc: int | None = None
    """Ranks to start; by default 2."""
    steps: int = _DEFAULT_STEPS
    """Batches to run in each of the first two epochs, before the last batch of the epoch."""
    resume: Annotated[str | None, tyro.conf.arg(metavar="WORDS|auto")] = None
    """Check the resume instead: train once whole, once killed and resumed twice, and compare. The
    words are added to the script's arguments to resume it; {checkpoint} stands for the newest
    checkpoint; auto if the script finds it by itself."""
    resume_nproc: MaybeNumbers = None
    """With --resume: also resume on these numbers of ranks."""
    seconds: float = 40.0
    """End the script this many seconds after its first step; what comes later is not checked."""
    stall_s: float | None = None
    """Report a hang if no rank makes progress for this many seconds; by default 20 times the median
    step, at least 30."""
    here: Switch = False
    """Check on the ranks and devices of the job that srun or torchrun has started."""
    json: Switch = False
    """Print one JSON object instead of the text."""
    sarif: Path | None = None
    """Also write the findings to this file in SARIF 2.1.0, for a code scanning service."""
    list: Switch = False
    """Show all codes instead of checking; with a code, as in --list SS104, show its page."""


def main(arguments: list[str]) -> int:
    """Run the verb: 0 nothing but advice, 1 something is wrong, 2 it could not be checked."""
    return run_as_rank(lambda _log: _check(arguments))


def _check(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        try:
            parse_flags(CheckFlags, "check SCRIPT.py", ["--help"], *_EXAMPLES)
        except AlreadyTold as told:
            raise AlreadyTold(0 if arguments else 2) from told
    if arguments[0] == "--list":
        return _list(arguments[1:])
    switches = {field.name for field in fields(CheckFlags) if field.type is Switch}
    arguments = target_first(arguments, switches)
    target = script_target("check", arguments, "a script, or -m and a module")
    flags = _with_words(target.flags, "--resume")
    command = parse_flags(CheckFlags, f"check {target.name}", flags, *_EXAMPLES)
    if command.list:
        return _list([])
    if not target.module:
        if target.name in RECIPES or is_recipe_file(Path(target.name)):
            return _verify(target, command, "a recipe")
        if loop_of(target.name):
            return _verify(target, command, "a loop with samestep.open_run")
    _check_flags(command)
    if target.module:
        target.check_importable()
    report = _report_here(target, command) if command.here else _report(target, command)
    return 0 if report is None else _tell(report, command)  # rank 0 tells it


def _with_words(flags: list[str], name: str) -> list[str]:
    """Join a flag to its value, which may itself begin with dashes."""
    if name not in flags[:-1]:
        return flags
    at = flags.index(name)
    return [*flags[:at], f"{name}={flags[at + 1]}", *flags[at + 2 :]]


def _check_flags(command: CheckFlags) -> None:
    check_positive(steps=command.steps, seconds=command.seconds, stall_s=command.stall_s)
    if command.resume is None and command.resume_nproc is not None:
        raise UserError("--resume-nproc says where to resume: give --resume, too.")
    if command.resume is not None and command.steps != _DEFAULT_STEPS:
        raise UserError("--resume needs epochs of their own length. Leave --steps out.")
    for number in numbers("resume-nproc", command.resume_nproc):
        check_ranks(number, flag="--resume-nproc")
    if command.here:
        given = {"--nproc": command.nproc, "--resume-nproc": command.resume_nproc}
        for flag in (flag for flag, value in given.items() if value is not None):
            raise UserError(f"--here takes the ranks of the job. Leave {flag} out.")
    else:
        check_ranks(_ranks(command))
        alone = "Start it as one process, in a shell or a job of one task; or give --here."
        refuse_inside_launcher("samestep check", alone)
    if command.sarif is not None and not command.sarif.absolute().parent.is_dir():
        raise UserError(f"--sarif {command.sarif}: there is no folder {command.sarif.parent}.")


def _ranks(command: CheckFlags) -> int:
    return _DEFAULT_RANKS if command.nproc is None else command.nproc


def _tell(report: "CheckReport", command: CheckFlags) -> int:
    from samestep.scripts.checking.check_report import as_table, report_lines  # noqa: PLC0415
    from samestep.scripts.checking.sarif import write_sarif  # noqa: PLC0415

    if command.sarif is not None:
        write_sarif(report, command.sarif)
    if command.json:
        sys.stdout.write(json.dumps(as_table(report), indent=2) + "\n")
    else:
        width, colour = _screen()
        lines = report_lines(report, width or _MOST_COLUMNS, colour=colour)
        sys.stdout.writelines(f"{line}\n" for line in lines)
    return report.exit_code


def _report(target: ScriptTarget, command: CheckFlags) -> "CheckReport":
    from samestep.scripts.checking.check_resume import check_resume  # noqa: PLC0415 - not for the help
    from samestep.scripts.checking.check_script import check_script  # noqa: PLC0415

    nproc = _ranks(command)
    if command.resume is not None:
        return check_resume(
            Path(target.name),
            target.words,
            resume=command.resume,
            resume_nproc=numbers("resume-nproc", command.resume_nproc),
            nproc=nproc,
            module=target.module,
            seconds=command.seconds,
            stall_s=command.stall_s,
            tell=_tell_cost,
        )
    console = Console(stderr=True, highlight=False)
    on = f"{target.name} runs on {count(nproc, 'rank')} …"
    with console.status(on) if console.is_terminal else nullcontext():
        return check_script(
            Path(target.name),
            target.words,
            nproc=nproc,
            module=target.module,
            steps=command.steps,
            seconds=command.seconds,
            stall_s=command.stall_s,
            asked=command.nproc is not None,
        )


def _tell_cost(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _report_here(target: ScriptTarget, command: CheckFlags) -> "CheckReport | None":
    from samestep.scripts.checking.here import check_here  # noqa: PLC0415 - it needs torch

    return check_here(
        Path(target.name),
        target.words,
        resume=command.resume,
        module=target.module,
        steps=command.steps,
        seconds=command.seconds,
        stall_s=command.stall_s,
        tell=_tell_cost,
    )


def _screen() -> tuple[int | None, bool]:
    """Return the width to write in, None for a pipe or a file, and whether to colour."""
    if not sys.stdout.isatty():
        return None, False
    return min(_MOST_COLUMNS, shutil.get_terminal_size().columns), not Console().no_color


def _list(codes: list[str]) -> int:
    import samestep.scripts.checking.rules  # noqa: F401, PLC0415 - registers them
    from samestep.scripts.checking.check_report import code_lines, page_of  # noqa: PLC0415

    width, colour = _screen()
    lines = [page_of(code.upper()) for code in codes]
    lines = lines or [f"{line}\n" for line in code_lines(width, colour=colour)]
    sys.stdout.writelines(lines)
    return 0


def _verify(target: ScriptTarget, command: CheckFlags, kind: str) -> int:
    """Run the verb for what samestep itself runs; a script that is checked calls it."""
    from samestep.shell.commands import verify  # noqa: PLC0415 - only for these

    takes_words = loop_of(target.name) is not None
    given = {"--sarif": command.sarif, "--resume": command.resume}
    unused = [flag for flag, value in given.items() if value is not None]
    if unused or (target.words and not takes_words):
        what = unused[0] if unused else "-- and what follows it"
        raise UserError(
            f"{target.name} is {kind}, which `samestep verify` checks. Leave {what} out."
        )
    words = [target.name, *(["--json"] * command.json)]
    if command.nproc is not None:
        words += ["--nproc", f"1,{command.nproc}"]
    if target.words:
        words += ["--", *target.words]
    sys.stderr.write(f"{target.name} is {kind}: samestep verify {' '.join(words)}\n")
    return verify.main(words)
