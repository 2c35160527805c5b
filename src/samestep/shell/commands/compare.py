"""`samestep compare`: runs side by side, read from their directories."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from samestep.shell.commands.help import Switch, parse_flags
from samestep.show.reporting.comparison import compare_runs
from samestep.show.reporting.comparison_text import as_table, lines

_EXAMPLES = ("compare runs/ONE runs/OTHER", "compare runs/spiral-* --target 0.95 --plot curves.png")


@dataclass(frozen=True, kw_only=True)
class CompareFlags:
    """Compare runs: which settings differ, whether it is the same training, speed, curves."""

    runs: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN…")]
    """Directories of two or more runs, or of one with --plot. Running and damaged runs are read as
    far as possible."""
    metric: str | None = None
    """Metric to compare: one of the validation set (loss, accuracy …), or train_loss; by default
    accuracy, else loss."""
    target: float | None = None
    """Show when the metric first reached this value."""
    plot: Annotated[Path | None, tyro.conf.arg(metavar="FILE.png")] = None
    """Draw the curves into a file; needs samestep[plot]."""
    any_recipe: Switch = False
    """Also compare runs of different recipes."""
    json: Switch = False
    """Print one JSON object."""


def main(arguments: list[str]) -> int:
    """Run the verb."""
    command = parse_flags(CompareFlags, "compare", arguments, *_EXAMPLES)
    found = compare_runs(
        command.runs,
        command.metric,
        command.target,
        any_recipe=command.any_recipe,
        alone=command.plot is not None,
    )
    if command.plot is not None:
        from samestep.show.reporting.comparison_text import plot  # noqa: PLC0415 - matplotlib is an extra

        plot(found, command.plot)
    text = json.dumps(as_table(found), indent=2) if command.json else "\n".join(lines(found))
    sys.stdout.write(f"{text}\n")
    return 0
