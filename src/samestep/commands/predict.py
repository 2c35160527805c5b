"""`samestep predict`: what a checkpoint of a run says of what is in files, on one device."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

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
    """Predict what is in files with a checkpoint of a run: classes, numbers, or what it shows."""

    run: RunPath
    """Directory of the run."""
    files: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="FILE…")]
    """What to look at."""
    checkpoint: str = "best"
    """`best`, `last`, or the name of a file in checkpoints/."""
    top: int = 5
    """How many classes to name for each file, or row of a file."""
    device: Device = "auto"
    """Where to compute; auto takes the best device here."""
    json: Switch = False
    """Print one JSON object for each file, or row of a file, a line each."""


def main(arguments: list[str]) -> int:
    """Run the verb; the exit code is 1 if a file could not be read."""
    command = parse_flags(Command, "predict", arguments, *_EXAMPLES)
    if not command.files:
        raise UserError("Name the files to look at: samestep predict RUN FILE…")
    check_positive(top=command.top)
    check_files(command.files)
    predictor = open_predictor(command.run, command.checkpoint, device=command.device)
    console = Console(highlight=False)
    code, before = 0, None
    for prediction in predict_files(predictor, command.files, top=command.top):
        code = code or int(prediction.problem is not None)
        if command.json:
            sys.stdout.write(json.dumps(as_table(prediction)) + "\n")
        else:
            begins = prediction.row in (None, 1) or prediction.file != before
            _show(console, prediction, begins=begins)
            before = prediction.file
    return code


def _show(console: Console, prediction: Prediction, *, begins: bool) -> None:
    """Print a file's name before its first row, and what is said of the row."""
    if begins:
        console.print(f"[bold]{escape(prediction.file)}[/]", soft_wrap=True)
    if prediction.problem is not None:
        row = f"row {prediction.row} " if prediction.row is not None else ""
        told = f"  [yellow]{row}cannot be read[/]: {escape(prediction.problem)}"
        console.print(told, soft_wrap=True)
        return
    values = [f"{name} {_words(value)}" for name, value in prediction.values.items()]
    classes = [f"{p:.4f}  {name}" for name, p in prediction.classes]
    if prediction.row is not None:
        line = "   ".join([*classes, *values])
        console.print(f"  {prediction.row:>4}  {escape(line)}", soft_wrap=True)
        return
    for line in [*classes, *values]:
        console.print(f"  {escape(line)}", soft_wrap=True)


def _words(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return " ".join(map(_words, value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(part)}" for name, part in value.items())
    return "-" if value is None else str(value)
