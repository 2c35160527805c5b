"""A file with a picture, drawn by matplotlib without a window."""

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from samestep.base.errors import UserError
from samestep.base.run.files import check_output, write_atomically


def check_picture(path: Path) -> None:
    """Check that a picture can be drawn into a file, before anything is computed for it."""
    try:
        import matplotlib as mpl  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise UserError(
            "--plot draws with matplotlib, which is not installed: pip install 'samestep[plot]'."
        ) from error
    mpl.use("agg")  # no window is opened
    check_output(path, "--plot", (".png", ".svg", ".pdf"))


@contextmanager
def picture(path: Path) -> Iterator[Any]:
    """Give a figure to draw into, and write it at the end."""
    check_picture(path)
    from matplotlib import pyplot as plt  # noqa: PLC0415 - asks for the backend when imported

    figure = plt.figure(figsize=(10, 4), layout="constrained")
    try:
        yield figure
        write_atomically(path, lambda file: figure.savefig(file, format=path.suffix[1:], dpi=120))
    finally:
        plt.close(figure)


_MOST_CLASSES = 100  # of more the cells would be smaller than a pixel or two
_MOST_NUMBERS = 20  # with more classes, the counts do not fit into the cells


def confusion_of(record: Mapping[str, Any]) -> list[list[int]] | None:
    """Return the confusion matrix of a record if it is a square of counts, a row for each class."""
    names, rows = record.get("per_class"), record.get("confusion")
    if not isinstance(names, Mapping) or not isinstance(rows, list) or len(rows) != len(names):
        return None
    square = all(isinstance(row, list) and len(row) == len(rows) for row in rows)
    counts = square and all(type(count) is int and count >= 0 for row in rows for count in row)
    return rows if counts else None


def has_confusion(record: Mapping[str, Any]) -> bool:
    """Whether a record has a confusion matrix that can be drawn."""
    return 1 < len(confusion_of(record) or ()) <= _MOST_CLASSES


def confusion_png(names: Sequence[str], rows: Sequence[Sequence[int]]) -> bytes | None:
    """Return a heat map as PNG: row by target, column by prediction; None without matplotlib."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an extra
    except ImportError:
        return None
    num = len(names)
    parts = [[count / max(1, sum(row)) for count in row] for row in rows]
    side = min(12.0, 3.0 + 0.45 * num)
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(parts, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, ax=axes, label="fraction of the class", shrink=0.8)
    labels = [name if len(name) <= 24 else f"{name[:23]}…" for name in names]
    size = 9 if num <= _MOST_NUMBERS else 6
    turned = 90 if num > 4 else 0
    axes.set_xticks(range(num), labels, rotation=turned, fontsize=size, parse_math=False)
    axes.set_yticks(range(num), labels, fontsize=size, parse_math=False)
    axes.set(xlabel="predicted", ylabel="target", title="Confusion matrix")
    if num <= _MOST_NUMBERS:
        for y, row in enumerate(rows):
            for x, count in enumerate(row):
                if count:
                    colour = "white" if parts[y][x] > 0.5 else "black"
                    text = axes.text(x, y, f"{count:,}", color=colour, fontsize=8)
                    text.set(ha="center", va="center")
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=100)
    return file.getvalue()
