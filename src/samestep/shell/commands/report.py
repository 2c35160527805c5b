"""`samestep report`: one HTML page of a run, of several runs, or of a scaling study."""

import sys
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from samestep.shell.commands.help import Switch, parse_flags
from samestep.show.reporting.page import write_report

_EXAMPLES = ("report runs/ID --open", "report runs/ONE runs/OTHER --target 0.95 -o both.html")


@dataclass(frozen=True, kw_only=True)
class ReportFlags:
    """Write one self-contained page about runs: curves, classes, ranks, settings."""

    runs: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN…")]
    """Directories of runs, which may still run or have been killed; or files of `samestep scale
    --json`."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"], metavar="FILE")] = None
    """File to write; by default report.html, in the run's directory if there is one run, else in
    the current directory."""
    target: float | None = None
    """With several runs: show when their metric first reached this value."""
    open: Switch = False
    """Open the page in the browser."""


def main(arguments: list[str]) -> int:
    """Run the verb."""
    command = parse_flags(ReportFlags, "report", arguments, *_EXAMPLES)
    file = write_report(command.runs, command.output, command.target)
    sys.stdout.write(f"{file}\n")
    if command.open and not webbrowser.open(file.resolve().as_uri()):
        sys.stderr.write(f"samestep: no browser could be opened; open {file} yourself.\n")
    return 0
