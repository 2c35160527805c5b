"""`samestep runs`: the runs in a folder, a line each."""

import sys
from pathlib import Path
from types import SimpleNamespace

from samestep.base.nearby import find_nearby
from samestep.shell.api.run_functions import runs
from samestep.shell.commands.forms import print_json, print_lines, terminal_width, verb
from samestep.show.reporting.run_table import as_json, read_runs, run_lines, sorted_runs

_BEGIN = "Begin one: samestep train spiral"


@verb("runs", "runs", "runs runs --recipe spiral --sort metric", of=runs)
def main(args: SimpleNamespace, *, json: bool = False) -> int:
    """List the runs in a folder: state, best metric, duration, and the curve of the loss.

    Args:
        args: what `samestep.runs` takes.
        json: Print one JSON array, with an object for each run.
    """
    folder, recipe = args.folder, args.recipe
    is_default = folder == Path("runs") and not folder.exists()
    there = [] if is_default else read_runs(folder)
    listed = sorted_runs([run for run in there if recipe in (None, run.recipe)], args.sort)
    if json:
        print_json([as_json(run) for run in listed])
    elif listed:
        print_lines(run_lines(listed, terminal_width()))
    elif there:
        recipes = ", ".join(sorted({run.recipe for run in there} - {""}))
        sys.stdout.write(f"No run in {folder} is of recipe {recipe}. The recipes are: {recipes}\n")
    else:
        other = find_nearby("runs", "runs") if is_default else None
        more = f"There are runs in {other}: samestep runs {other}" if other else _BEGIN
        sys.stdout.write(f"There is no run in {folder} yet. {more}\n")
    return 0
