"""`samestep runs`: the runs in a folder, a line each."""

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from samestep.base.nearby import find_nearby
from samestep.base.run.summary import Sort, read_runs, sorted_runs
from samestep.shell.commands.help import Switch, parse_flags
from samestep.show.reporting.run_table import as_json, run_lines

_BEGIN = "Begin one: samestep train spiral"
_EXAMPLES = ("runs", "runs runs --recipe spiral --sort metric")


@dataclass(frozen=True, kw_only=True)
class RunsFlags:
    """List the runs in a folder: state, best metric, duration, and the curve of the loss."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER")] = Path("runs")
    """Folder that holds the runs."""
    sort: Sort = "date"
    """Order of the list. metric: best first; duration: longest first; date: newest first."""
    recipe: str | None = None
    """List only the runs of this recipe."""
    json: Switch = False
    """Print one JSON array, with an object for each run."""


def main(arguments: list[str]) -> int:
    """Run the verb."""
    command = parse_flags(RunsFlags, "runs", arguments, *_EXAMPLES)
    is_default = command.folder == Path("runs") and not command.folder.exists()
    found = [] if is_default else read_runs(command.folder)
    wanted = command.recipe
    runs = [run for run in found if wanted in (None, run.recipe)]
    runs = sorted_runs(runs, command.sort)
    if command.json:
        sys.stdout.write(json.dumps([as_json(run) for run in runs]) + "\n")
    elif runs:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        sys.stdout.writelines(f"{line}\n" for line in run_lines(runs, width))
    elif found:
        there = ", ".join(sorted({run.recipe for run in found} - {""}))
        sys.stdout.write(f"No run in {command.folder} is of recipe {wanted}. There are: {there}\n")
    else:
        other = find_nearby("runs", "runs") if is_default else None
        more = f"There are some in {other}: samestep runs {other}" if other else _BEGIN
        sys.stdout.write(f"There is no run in {command.folder} yet. {more}\n")
    return 0
