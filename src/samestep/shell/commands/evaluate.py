"""`samestep evaluate`: a checkpoint of a run, on one device, whatever it was trained on."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

import samestep
from samestep.base.run.directory import plain
from samestep.base.settings import Device
from samestep.base.table import escape
from samestep.base.words import class_table, measured
from samestep.shell.commands.help import CheckpointName, RunPath, Switch, parse_flags

_EXAMPLES = (
    "evaluate runs/ID --checkpoint best",
    "evaluate runs/ID --checkpoint checkpoint_epoch_3.pt --split validation --json",
)


@dataclass(frozen=True, kw_only=True)
class EvaluateFlags:
    """Evaluate a checkpoint of a run on one device."""

    run: RunPath
    """Directory of the run."""
    checkpoint: CheckpointName = "best"
    """`best`, `last`, or the name of a file in checkpoints/."""
    split: Literal["train", "validation", "test"] = "test"
    """Part of the data to evaluate."""
    recipe: Annotated[Path | None, tyro.conf.arg(metavar="FILE.py")] = None
    """Recipe file to use, if the recipe has changed since the run began; the run's own copy is
    recipe.py in its directory."""
    device: Device = "auto"
    """Device to use; auto takes the best one of this machine."""
    data_dir: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder of the data, if it has moved since the training."""
    skip_bad: int | None = None
    """How many files of the data may be unreadable, if the recipe has this option."""
    json: Switch = False
    """Print one JSON object."""


def main(arguments: list[str]) -> int:
    """Run the verb."""
    command = parse_flags(EvaluateFlags, "evaluate", arguments, *_EXAMPLES)
    result = samestep.evaluate(
        command.run,
        command.checkpoint,
        split=command.split,
        recipe=command.recipe,
        device=command.device,
        data_dir=command.data_dir,
        skip_bad=command.skip_bad,
    )
    if command.json:
        sys.stdout.write(json.dumps(plain(result)) + "\n")
        return 0
    console = Console(highlight=False)
    for note in result.pop("notes", []):
        console.print(f"[yellow]{'note':<12}[/]{escape(note)}", soft_wrap=True)
    table = class_table(result.pop("per_class", {}), result.pop("confusion", []))
    width = max(12, *(len(name) + 2 for name in result))
    for name, value in result.items():
        shown = measured(value) if isinstance(value, float) else str(value)
        console.print(f"[bold]{name:<{width}}[/]{escape(shown)}", soft_wrap=True)
    for line in table:
        console.print(f"{'':<{width}}{escape(line)}", soft_wrap=True)
    return 0
