"""`samestep predict`: predict files with a checkpoint of a run, on one device.

It shows rows as they come, so it uses the generators that `samestep.predict` is made of.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console

from samestep.base.errors import UserError
from samestep.base.settings import Device
from samestep.base.table import escape
from samestep.base.words import Columns, measured, word
from samestep.shell.commands.help import (
    CheckpointName,
    RunPath,
    Switch,
    check_positive,
    parse_flags,
)
from samestep.show.reporting.plot import check_picture, picture

if TYPE_CHECKING:
    from samestep.core.session.prediction import Prediction

_ROWS_TOGETHER = 32
_EXAMPLES = ("predict runs/ID photo.jpg", "predict runs/ID a.jpg b.png --top 1 --json")


@dataclass(frozen=True, kw_only=True)
class PredictFlags:
    """Predict files with a trained model: classes, numbers, or what the recipe shows."""

    run: RunPath
    """Directory of the run."""
    files: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="FILE…")]
    """Files to predict."""
    checkpoint: CheckpointName = "best"
    """`best`, `last`, or the name of a file in checkpoints/."""
    top: int = 5
    """Number of classes to show for each file, or for each row of a file."""
    recipe: Annotated[Path | None, tyro.conf.arg(metavar="FILE.py")] = None
    """Recipe file to use, if the recipe has changed since the run began; the run's own copy is
    recipe.py in its directory."""
    device: Device = "auto"
    """Device to use; auto takes the best one of this machine."""
    plot: Annotated[Path | None, tyro.conf.arg(metavar="FILE.png")] = None
    """Draw the predictions of one file, if the recipe has a `plot`; needs samestep[plot]."""
    json: Switch = False
    """Print one line of JSON for each file, or for each row of a file."""


def main(arguments: list[str]) -> int:
    """Run the verb; the exit code is 1 if a file could not be read."""
    command = parse_flags(PredictFlags, "predict", arguments, *_EXAMPLES)
    if not command.files:
        raise UserError("Name the files to predict: samestep predict RUN FILE…")
    from samestep.core.recipe import find_recipe  # noqa: PLC0415 - the help needs no torch
    from samestep.core.session.prediction import (  # noqa: PLC0415
        as_table,
        check_draws,
        check_files,
        draw,
        open_predictor,
        predict_files,
    )

    check_positive(top=command.top)
    check_files(command.files)
    if command.plot is not None:
        if len(command.files) > 1:
            raise UserError("--plot draws one file; predict the others in separate commands.")
        check_picture(command.plot)
    given = None if command.recipe is None else find_recipe(str(command.recipe))
    predictor = open_predictor(command.run, command.checkpoint, device=command.device, given=given)
    if command.plot is not None:
        check_draws(predictor)
    found: list[Prediction] = []
    code, shown = 0, _Shown()
    for block in _blocks(predict_files(predictor, command.files, top=command.top)):
        code = code or int(any(one.problem is not None for one in block))
        if command.plot is not None:
            found += block
        if command.json:
            sys.stdout.writelines(json.dumps(as_table(one)) + "\n" for one in block)
        else:
            shown.show(block)
    if command.plot is not None and not code:
        with picture(command.plot) as figure:
            draw(predictor, command.files[0], [one.values for one in found], figure)
    return code


def _blocks(predictions: "Iterator[Prediction]") -> "Iterator[list[Prediction]]":
    """Yield predictions in blocks of rows with the same columns."""
    block: list[Prediction] = []
    for one in predictions:
        other = block and _names(one) != _names(block[0])
        if other or one.row in (None, 1) or len(block) == _ROWS_TOGETHER:
            yield from [block] if block else []
            block = []
        block.append(one)
    yield from [block] if block else []


def _names(one: "Prediction") -> tuple[str, ...]:
    """Return the columns of a row that fits into a table; empty for other predictions."""
    plain = not any(isinstance(value, list | dict) for value in one.values.values())
    return tuple(one.values) if one.row is not None and not one.classes and plain else ()


class _Shown:
    """Prints predictions; headings depend on what was printed last."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._file = ""
        self._columns: Columns | None = None

    def show(self, block: "Sequence[Prediction]") -> None:
        """Print a file's name before its first row, and the rows."""
        if block[0].row in (None, 1) or block[0].file != self._file:
            self._print(f"[bold]{escape(block[0].file)}[/]")
            self._columns = None
        self._file = block[0].file
        if not _names(block[0]):
            self._columns = None
            for one in block:
                self._show_alone(one)
            return
        # A terminal scrolls, so each block repeats the headings.
        heading = self._columns is None or self._console.is_terminal
        self._columns = self._columns or Columns()
        rows = [{"row": one.row, **one.values} for one in block]
        for place, line in enumerate(self._columns.lines(rows, heading=heading)):
            text = escape(line)
            self._print(f"  [bold]{text}[/]" if heading and place == 0 else f"  {text}")

    def _show_alone(self, one: "Prediction") -> None:
        if one.problem is not None:
            row = f"row {one.row} " if one.row is not None else ""
            self._print(f"  [yellow]{row}cannot be read[/]: {escape(one.problem)}")
            return
        values = [f"{name} {word(value)}" for name, value in one.values.items()]
        told = [*(f"{measured(p)}  {name}" for name, p in one.classes), *values]
        if one.row is not None:
            told = [f"{one.row:>4}  {'   '.join(told)}"]
        for line in told:
            self._print(f"  {escape(line)}")

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)
