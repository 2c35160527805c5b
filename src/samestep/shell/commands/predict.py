"""`samestep predict`: predict files, or a split, with a checkpoint of a run, on one device.

It shows rows as they come, so it uses the generators that `samestep.predict` is made of.
"""

import csv
import importlib.util
import io
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from json import dumps
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

from samestep.base.errors import UserError, escape
from samestep.base.flags import InShell
from samestep.base.run.files import check_output, write_atomically
from samestep.base.words import Columns, count, measured, word
from samestep.shell.api.arguments import check_positive
from samestep.shell.api.run_functions import predict
from samestep.shell.commands.forms import rich_console, verb
from samestep.show.reporting.plot import check_picture, picture

if TYPE_CHECKING:
    from samestep.core.session.prediction import Prediction

_ROWS_TOGETHER = 32


@verb(
    "predict",
    "predict runs/ID photo.jpg",
    "predict runs/ID a.jpg b.png --top 1 --json",
    "predict runs/ID --split test --out predictions.csv",
    of=predict,
)
def main(
    args: SimpleNamespace,
    *,
    out: Annotated[Path | None, InShell("FILE", short=("-o",))] = None,
    plot: Annotated[Path | None, InShell("FILE.png")] = None,
    json: bool = False,
) -> int:
    """Predict files or a split with a trained model: classes, numbers, or what the recipe shows.

    Args:
        args: what `samestep.predict` takes.
        out: Write the predictions into a file: .csv, .jsonl, or .parquet (pip install pyarrow).
        plot: Draw the predictions of one file, if it has `Recipe(plot=…)`; needs samestep[plot].
        json: Print one line of JSON for each file, or for each row of a file or split.
    """
    files: Sequence[Path] = args.files or ()
    _check(args, files, out, plot)
    from samestep.core.recipe import find_recipe  # noqa: PLC0415 - the help needs no torch
    from samestep.core.session import prediction  # noqa: PLC0415

    model, predictions = prediction.open_predictions(
        args.run,
        args.checkpoint,
        files=files,
        split=args.split,
        top=args.top,
        device=args.device,
        recipe=None if args.recipe is None else find_recipe(str(args.recipe)),
        data_dir=args.data_dir and str(args.data_dir),
        skip_bad=args.skip_bad,
    )
    if plot is not None:
        prediction.check_draws(model)
    to_write: list[Prediction] = []
    code = 0
    shown = _Shown()
    for block in _blocks(predictions):
        code = code or int(any(row.problem is not None for row in block))
        if not (plot is None and out is None):
            to_write += block
        if json:
            sys.stdout.writelines(dumps(prediction.as_table(row)) + "\n" for row in block)
        elif out is None:
            shown.show(block)
    if out is not None:
        _write_table(out, [*map(prediction.as_table, to_write)])
        bad = sum(row.problem is not None for row in to_write)
        more = f"; {bad:,} failed: see `problem` there" if bad else ""
        summary = f"wrote    {count(len(to_write) - bad, 'prediction')} to {out}{more}\n"
        sys.stdout.write("" if json else summary)
    if plot is not None and code:
        sys.stderr.write(f"{plot} is not drawn: some rows of {files[0]} could not be predicted.\n")
    elif plot is not None:
        with picture(plot) as figure:
            prediction.draw(model, files[0], [row.values for row in to_write], figure)
    return code


def _check(
    args: SimpleNamespace, files: Sequence[Path], out: Path | None, plot: Path | None
) -> None:
    if args.split is None and not files:
        raise UserError("Name files to predict: samestep predict RUN FILE…; or use --split test.")
    check_positive(top=args.top)
    if out is not None:
        check_output(out, "--out", (".csv", ".jsonl", ".parquet"))
        if out.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
            raise UserError(f"--out {out} needs the package pyarrow: pip install pyarrow")
    if plot is not None:
        if len(files) != 1:
            raise UserError("--plot draws one file; run one command per file.")
        check_picture(plot)


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
        name = block[0].file or block[0].split
        if block[0].row in (None, 1) or name != self._file:
            self._print(f"[bold]{escape(name)}[/]")
            self._columns = None
        self._file = name
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


def _write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write predictions, as `--json` has them, into a file.

    In CSV and Parquet the classes are columns: `class`, `probability`, `class_2`, …. In CSV a list
    or dict is JSON; in Parquet a column is whose values have no type in common.
    """
    flat = [] if path.suffix == ".jsonl" else [*map(_flat, rows)]

    def write(file: BinaryIO) -> None:
        if path.suffix == ".jsonl":
            file.writelines(dumps(row).encode() + b"\n" for row in rows)
        elif path.suffix == ".csv":
            _write_csv(file, flat)
        else:
            _write_parquet(file, flat)

    write_atomically(path, write)


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with a column for each class and probability."""
    flat = {name: value for name, value in row.items() if name != "classes"}
    for place, guess in enumerate(row.get("classes", ()), 1):
        end = f"_{place}" if place > 1 else ""
        flat |= {f"class{end}": guess["class"], f"probability{end}": guess["probability"]}
    return flat


def _columns(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    return [*dict.fromkeys(name for row in rows for name in row)]


def _write_parquet(file: BinaryIO, rows: list[dict[str, Any]]) -> None:
    import pyarrow as pa  # noqa: PLC0415 - an extra
    from pyarrow import parquet  # noqa: PLC0415

    def column(name: str) -> Any:
        values = [row.get(name) for row in rows]  # of rows that differ, each has all
        try:
            typed = pa.array(values)
            parquet.write_table(pa.table({name: typed[:0]}), pa.BufferOutputStream())
        except (pa.ArrowException, OverflowError):  # such as a tuple of a number and a list
            return pa.array([None if value is None else dumps(value) for value in values])
        return typed

    parquet.write_table(pa.table({name: column(name) for name in _columns(rows)}), file)


def _write_csv(file: BinaryIO, rows: list[dict[str, Any]]) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    writer = csv.DictWriter(text, _columns(rows))
    writer.writeheader()
    for row in rows:
        plain = {k: dumps(v) if isinstance(v, list | dict) else v for k, v in row.items()}
        writer.writerow(plain)
    text.flush()
    text.detach()
