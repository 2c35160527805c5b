"""`samestep predict`: predict files with a checkpoint of a run, on one device.

It shows rows as they come, so it uses the generators that `samestep.predict` is made of.
"""

import sys
from collections.abc import Iterator, Sequence
from json import dumps
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated

from samestep.base.errors import UserError
from samestep.base.flags import InShell
from samestep.base.table import escape
from samestep.base.words import Columns, measured, word
from samestep.shell.api.arguments import check_positive
from samestep.shell.api.trained_models import predict
from samestep.shell.commands.forms import verb
from samestep.shell.commands.help import rich_console
from samestep.show.reporting.plot import check_picture, picture

if TYPE_CHECKING:
    from samestep.core.session.prediction import Prediction

_ROWS_TOGETHER = 32


@verb(
    "predict", "predict runs/ID photo.jpg", "predict runs/ID a.jpg b.png --top 1 --json", of=predict
)
def main(
    given: SimpleNamespace,
    *,
    plot: Annotated[Path | None, InShell("FILE.png")] = None,
    json: bool = False,
) -> int:
    """Predict files with a trained model: classes, numbers, or what the recipe shows.

    Args:
        given: what `samestep.predict` takes.
        plot: Draw the predictions of one file, if it has `Recipe(plot=…)`; needs samestep[plot].
        json: Print one line of JSON for each file, or for each row of a file.
    """
    if not given.files:
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

    check_positive(top=given.top)
    check_files(given.files)
    if plot is not None:
        if len(given.files) > 1:
            raise UserError("--plot draws one file; predict the others in separate commands.")
        check_picture(plot)
    recipe = None if given.recipe is None else find_recipe(str(given.recipe))
    predictor = open_predictor(given.run, given.checkpoint, device=given.device, given=recipe)
    if plot is not None:
        check_draws(predictor)
    drawn: list[Prediction] = []
    code, shown = 0, _Shown()
    for block in _blocks(predict_files(predictor, given.files, top=given.top)):
        code = code or int(any(row.problem is not None for row in block))
        if plot is not None:
            drawn += block
        if json:
            sys.stdout.writelines(dumps(as_table(row)) + "\n" for row in block)
        else:
            shown.show(block)
    if plot is not None and not code:
        with picture(plot) as figure:
            draw(predictor, given.files[0], [row.values for row in drawn], figure)
    return code


def _blocks(predictions: "Iterator[Prediction]") -> "Iterator[list[Prediction]]":
    """Yield predictions in blocks of rows with the same columns."""
    block: list[Prediction] = []
    for row in predictions:
        other = block and _names(row) != _names(block[0])
        if other or row.row in (None, 1) or len(block) == _ROWS_TOGETHER:
            yield from [block] if block else []
            block = []
        block.append(row)
    yield from [block] if block else []


def _names(row: "Prediction") -> tuple[str, ...]:
    """Return the columns of a row that fits into a table; empty for other predictions."""
    plain = not any(isinstance(value, list | dict) for value in row.values.values())
    return tuple(row.values) if row.row is not None and not row.classes and plain else ()


class _Shown:
    """Prints predictions; headings depend on what was printed last."""

    def __init__(self) -> None:
        self._console = rich_console()
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
            for row in block:
                self._show_alone(row)
            return
        # A terminal scrolls, so each block repeats the headings.
        heading = self._columns is None or self._console.is_terminal
        self._columns = self._columns or Columns()
        rows = [{"row": row.row, **row.values} for row in block]
        for place, line in enumerate(self._columns.lines(rows, heading=heading)):
            text = escape(line)
            self._print(f"  [bold]{text}[/]" if heading and place == 0 else f"  {text}")

    def _show_alone(self, row: "Prediction") -> None:
        if row.problem is not None:
            place = f"row {row.row} " if row.row is not None else ""
            self._print(f"  [yellow]{place}cannot be read[/]: {escape(row.problem)}")
            return
        values = [f"{name} {word(value)}" for name, value in row.values.items()]
        texts = [*(f"{measured(p)}  {name}" for name, p in row.classes), *values]
        if row.row is not None:
            texts = [f"{row.row:>4}  {'   '.join(texts)}"]
        for line in texts:
            self._print(f"  {escape(line)}")

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)
