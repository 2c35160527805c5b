"""`samestep report`: one HTML page of a run, of several runs, or of a scaling study."""

import sys
import webbrowser
from pathlib import Path
from typing import Annotated

from samestep.base.flags import InShell
from samestep.shell.commands.forms import verb
from samestep.show.reporting.page import write_report


@verb("report", "report runs/ID --open", "report runs/ONE runs/OTHER --target 0.95 -o both.html")
def main(
    runs: Annotated[tuple[Path, ...], InShell("RUN…")],
    *,
    output: Annotated[Path | None, InShell("FILE", short=("-o",))] = None,
    target: float | None = None,
    open: bool = False,  # noqa: A002 - the flag
) -> int:
    """Write one self-contained page about runs: curves, classes, ranks, settings.

    Args:
        runs: Directories of runs, which may still run or have been killed; or files of `samestep
            scale --json`.
        output: File to write; by default report.html, in the run's directory if there is one run,
            else in the current directory.
        target: With several runs: show when their metric first reached this value.
        open: Open the page in the browser.
    """
    file = write_report(runs, output, target)
    sys.stdout.write(f"{file}\n")
    if open and not webbrowser.open(file.resolve().as_uri()):
        sys.stderr.write(f"samestep: no browser could be started; open {file} yourself.\n")
    return 0
