"""Make a report and write it into a file: what commands and notebooks call."""

from collections.abc import Sequence
from pathlib import Path

from samestep.errors import UserError
from samestep.reporting.collect import collect
from samestep.reporting.page import render
from samestep.run.files import write_text

NAME = "report.html"


def write_report(
    paths: Sequence[Path], output: Path | None = None, target: float | None = None
) -> Path:
    """Write the page of some runs, and return its path.

    By default it is `report.html` in the directory of a single run, else in the current one.

    Raises:
        UserError: there is no such run, or the file cannot be written.
    """
    single = len(paths) == 1 and paths[0].is_dir()
    file = output or (paths[0] / NAME if single else Path(NAME))
    if file.is_dir():
        raise UserError(f"-o {file} is a directory; name a file in it: -o {file / NAME}")
    if output is not None and not file.parent.is_dir():
        raise UserError(
            f"-o {file}: there is no directory {file.parent}; make it, or name another."
        )
    if output is not None and file.exists() and not _is_page(file):
        raise UserError(
            f"-o {file} exists and is no page that samestep has made; name another file, or "
            "delete it first."
        )
    html = render(collect(paths, target)).html
    try:
        write_text(file, html)
    except UserError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        reason = error.__cause__.strerror or error.__cause__
        raise UserError(
            f"{file} could not be written: {reason}. Name a file elsewhere: -o {NAME}"
        ) from error
    return file


def _is_page(file: Path) -> bool:
    with file.open("rb") as opened:
        return b'name="generator" content="samestep' in opened.read(4096)
