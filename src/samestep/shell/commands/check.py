"""`samestep check`: what is wrong with anyone's distributed script, found while it runs."""

import json
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.base.errors import AlreadyTold, UserError
from samestep.base.file_kinds import is_recipe_file, loop_of
from samestep.base.run.files import write_text
from samestep.base.words import count
from samestep.core.recipes import RECIPES
from samestep.launch.ranks.nproc import refuse_inside_launcher
from samestep.launch.ranks.process import run_as_rank
from samestep.shell.api.arguments import check_positive
from samestep.shell.api.on_ranks import DEFAULT_RANKS, check, run_check
from samestep.shell.commands.forms import (
    Form,
    Switch,
    kind_of,
    parse,
    print_json,
    print_lines,
    rich_console,
    terminal_width,
)
from samestep.shell.commands.target import ScriptTarget, script_target, target_first

if TYPE_CHECKING:
    from samestep.scripts.checking.check_report import CheckReport

_MOST_COLUMNS = 100


@dataclass(frozen=True, kw_only=True)
class CheckFlags:
    """Run a training script on a few CPU ranks, and report what is wrong with it.

    The script runs unchanged, in a copy of its folder, for some steps of two epochs. To check a
    module, name it as for Python: samestep check -m MODULE. Arguments of the script follow `--`.

    A short run cannot show what starts later, what only happens on a GPU, or what you intend. The
    report lists the rules that did not see enough to judge.

    Exit codes: 0 advice at most, 1 something is wrong, 2 the script could not be checked.
    """

    here: Switch = False
    """Check on the ranks and devices of the job that srun or torchrun has started."""
    json: Switch = False
    """Print one JSON object instead of the text."""
    sarif: Path | None = None
    """Also write the findings to this file in SARIF 2.1.0, for a code scanning service."""
    list: Switch = False
    """Show all codes instead of checking; with a code, as in --list SS104, show its page."""


FORM = Form(
    verb="check",
    kind=kind_of(check, CheckFlags, left_out=("script", "args", "module")),
    examples=(
        "check train.py -- --epochs 1",
        'check --resume "--resume-from out/last.pt" train.py -- --epochs 3',
        "check --list SS104",
    ),
)


def main(arguments: list[str]) -> int:
    """Return 0 for nothing but advice, 1 if something is wrong, 2 if it could not be checked."""
    return run_as_rank(lambda _log: _check(arguments))


def _check(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        try:
            parse(FORM, ["--help"], "SCRIPT.py")
        except AlreadyTold as shown:
            raise AlreadyTold(0 if arguments else 2) from shown
    if arguments[0] == "--list":
        return _list(arguments[1:])
    arguments = target_first(arguments, FORM.kind)
    target = script_target("check", arguments, "a script, or -m and a module")
    command = parse(FORM, _with_value([*target.flags]), target.name)
    if command.list:
        return _list([])
    if not target.module:
        if target.name in RECIPES or is_recipe_file(Path(target.name)):
            return _verify(target, command, "a recipe")
        if loop_of(target.name) and command.resume is None:
            return _verify(target, command, "a loop with samestep.open_run")
    _check_flags(command)
    if target.module:
        target.check_importable()
    report = _report(target, command)
    return 0 if report is None else _print_report(report, command)  # only rank 0 has it


def _with_value(flags: list[str]) -> list[str]:
    """Join --resume with its value, which may itself begin with dashes."""
    if "--resume" not in flags:
        return flags
    at = flags.index("--resume")
    if at + 1 == len(flags):
        words = "auto, or in quotes the arguments that resume the script"
        raise UserError(f"--resume needs a value: {words}.")
    return [*flags[:at], f"--resume={flags[at + 1]}", *flags[at + 2 :]]


def _check_flags(command: Any) -> None:
    if command.resume is not None and command.steps != FORM.kind().steps:
        raise UserError("--resume needs whole epochs. Leave --steps out.")
    if command.here:
        check_positive(steps=command.steps, seconds=command.seconds, stall_s=command.stall_s)
        of_ranks = {"--nproc": command.nproc, "--resume-nproc": command.resume_nproc}
        for flag in (flag for flag, value in of_ranks.items() if value is not None):
            raise UserError(f"--here uses the ranks of the job. Leave {flag} out.")
    else:
        alone = "Start one process, in a shell or in a job with one task, or add --here."
        refuse_inside_launcher("samestep check", alone)
    if command.sarif is not None and not command.sarif.absolute().parent.is_dir():
        raise UserError(f"--sarif {command.sarif}: there is no folder {command.sarif.parent}.")


def _print_report(report: "CheckReport", command: Any) -> int:
    from samestep.scripts.checking.check_report import as_table, report_lines  # noqa: PLC0415
    from samestep.scripts.checking.sarif import as_sarif  # noqa: PLC0415

    if command.sarif is not None:
        write_text(command.sarif, json.dumps(as_sarif(report), indent=2) + "\n")
    if command.json:
        print_json(as_table(report), indent=2)
    else:
        width, colour = _screen()
        print_lines(report_lines(report, width or _MOST_COLUMNS, colour=colour))
    return report.exit_code


def _report(target: ScriptTarget, command: Any) -> "CheckReport | None":
    asked: dict[str, Any] = {
        "module": target.module,
        "steps": command.steps,
        "resume": command.resume,
        "seconds": command.seconds,
        "stall_s": command.stall_s,
        "tell": lambda text: sys.stderr.write(f"{text}\n"),
    }
    script = Path(target.name)
    if command.here:
        from samestep.scripts.checking.here import check_here  # noqa: PLC0415 - it needs torch

        return check_here(script, target.words, **asked)
    sizes, nproc = command.resume_nproc, command.nproc
    console = rich_console(stderr=True)
    on = f"{target.name} runs on {count(nproc or DEFAULT_RANKS, 'rank')} …"
    shows = console.is_terminal and command.resume is None
    with console.status(on) if shows else nullcontext():
        return run_check(script, target.words, nproc=nproc, resume_nproc=sizes, **asked)


def _screen() -> tuple[int | None, bool]:
    """Return the width to write in, None for a pipe or a file, and whether to colour."""
    if (width := terminal_width()) is None:
        return None, False
    return min(_MOST_COLUMNS, width), not rich_console().no_color


def _list(codes: list[str]) -> int:
    import samestep.scripts.checking.rules  # noqa: F401, PLC0415 - registers them
    from samestep.scripts.checking.check_report import code_lines, page_of  # noqa: PLC0415

    width, colour = _screen()
    if codes:
        sys.stdout.writelines(page_of(code.upper()) for code in codes)
    else:
        print_lines(code_lines(width, colour=colour))
    return 0


def _verify(target: ScriptTarget, command: Any, kind: str) -> int:
    """Verify what samestep itself runs; a script that is checked calls it."""
    from samestep.shell.commands import verify  # noqa: PLC0415 - only for these

    takes_words = loop_of(target.name) is not None
    only_of_check = {"--sarif": command.sarif, "--resume": command.resume}
    unused = [flag for flag, value in only_of_check.items() if value is not None]
    if unused or (target.words and not takes_words):
        superfluous = unused[0] if unused else "-- and what follows it"
        raise UserError(f"{target.name} is {kind}: use `samestep verify` without {superfluous}.")
    words = [target.name, "--json"] if command.json else [target.name]
    if command.nproc is not None:
        words += ["--nproc", f"1,{command.nproc}"]
    if target.words:
        words += ["--", *target.words]
    sys.stderr.write(f"{target.name} is {kind}: samestep verify {' '.join(words)}\n")
    return verify.main(words)
