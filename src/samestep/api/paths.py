"""Paths as arguments: text, or anything that stands for a path, as a run does."""

import os
from pathlib import Path
from typing import Any

from samestep.errors import UserError

AnyPath = str | os.PathLike[str]


def path_of(value: Any, name: str) -> Path:
    """Return an argument as a path.

    Raises:
        UserError: it is no path, or empty.
    """
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        shown = repr(value) if isinstance(value, str) else f"of type {type(value).__name__}"
        raise UserError(f"{name} is {shown}; it must be a path, or a run.")
    return Path(os.fspath(value))
