"""A file with a picture, drawn by matplotlib without a window."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from samestep.errors import UserError
from samestep.run.files import write_atomically


def check_picture(path: Path) -> None:
    """Check that a picture can be drawn into a file, before anything is computed for it.

    Raises:
        UserError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        import matplotlib as mpl  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise UserError(
            "--plot draws with matplotlib, which is not installed: pip install 'samestep[plot]'."
        ) from error
    mpl.use("agg")  # no window is opened
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--plot {path}: the name must end in .png, .svg or .pdf.")
    if not path.parent.is_dir():
        raise UserError(f"--plot {path}: there is no directory {path.parent}.")


@contextmanager
def picture(path: Path) -> Iterator[Any]:
    """Give a figure to draw into, and write it at the end.

    Raises:
        UserError: matplotlib is not installed, or the file cannot be written.
    """
    check_picture(path)
    from matplotlib import pyplot as plt  # noqa: PLC0415 - asks for the backend when imported

    figure = plt.figure(figsize=(10, 4), layout="constrained")
    try:
        yield figure
        write_atomically(path, lambda file: figure.savefig(file, format=path.suffix[1:], dpi=120))
    finally:
        plt.close(figure)
