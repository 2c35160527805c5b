"""`samestep predict`: what a checkpoint of a run says of some files, on one device."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape

from samestep.commands.help import RunPath, Switch, check_positive, parse_flags
from samestep.errors import UserError
from samestep.execution.prediction import (
    Prediction,
    as_table,
    check_files,
    open_predictor,
    predict_files,
)
from samestep.ranks.world import Device

_EXAMPLES = ("predict runs/ID photo.jpg", "predict runs/ID a.jpg b.png --top 1 --json")


@dataclass(frozen=True, kw_only=True)
class Command:
    """Predict the classes of files with a checkpoint of a run."""

    run: RunPath
    """Directory of the run."""
    files: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="FILE…")]
    """What to look at."""
    checkpoint: str = "best"
    """`best`, `last`, or the name of a file in checkpoints/."""
    top: int = 5
    """How many classes to name for each file."""
    device: Device = "auto"
    """Where to compute; auto takes the best device here."""
    json: Switch = False
    """Print one JSON object a file, a line each."""


def main(arguments: list[str]) -> int:
    """Run the verb; the exit code is 1 if a file could not be read."""
    command = parse_flags(Command, "predict", arguments, *_EXAMPLES)
    if not command.files:
        raise UserError("Name the files to look at: samestep predict RUN FILE…")
    check_positive(top=command.top)
    check_files(command.files)
    predictor = open_predictor(command.run, command.checkpoint, device=command.device)
    console = Console(highlight=False)
    code = 0
    for prediction in predict_files(predictor, command.files, top=command.top):
        code = code or int(prediction.problem is not None)
        if command.json:
            sys.stdout.write(json.dumps(as_table(prediction)) + "\n")
        else:
            _show(console, prediction)
    return code


def _show(console: Console, prediction: Prediction) -> None:
    console.print(f"[bold]{escape(prediction.file)}[/]", soft_wrap=True)
    if prediction.problem is not None:
        console.print(f"  [yellow]cannot be read[/]: {escape(prediction.problem)}", soft_wrap=True)
    for name, probability in prediction.classes:
        console.print(f"  {probability:.4f}  {escape(name)}", soft_wrap=True)
