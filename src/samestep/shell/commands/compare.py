"""`samestep compare`: runs side by side, read from their directories."""

from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

from samestep.base.flags import InShell
from samestep.shell.api.run_functions import compare
from samestep.shell.commands.forms import print_json, print_lines, verb
from samestep.show.reporting.comparison import compare_runs
from samestep.show.reporting.comparison_text import as_table, lines
from samestep.show.reporting.comparison_text import plot as draw


@verb(
    "compare",
    "compare runs/ONE runs/OTHER",
    "compare runs/spiral-* --target 0.95 --plot curves.png",
    of=compare,
)
def main(
    args: SimpleNamespace,
    *,
    plot: Annotated[Path | None, InShell("FILE.png")] = None,
    json: bool = False,
) -> int:
    """Compare runs: which settings differ, whether it is the same training, speed, curves.

    Args:
        args: what `samestep.compare` takes.
        plot: Draw the curves into a file, also of a single run; needs samestep[plot].
        json: Print one JSON object.
    """
    comparison = compare_runs(
        args.runs, args.metric, args.target, any_recipe=args.any_recipe, alone=plot is not None
    )
    if plot is not None:
        draw(comparison, plot)
    if json:
        print_json(as_table(comparison), indent=2)
    else:
        print_lines(lines(comparison))
    return 0
