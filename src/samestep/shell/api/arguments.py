"""Shared by all public functions, without torch: path arguments, and errors in one line."""

import functools
import os
import sys
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from samestep.base.errors import UserError, no_exit, raised_at

P = ParamSpec("P")
T = TypeVar("T")
AnyPath = str | os.PathLike[str]


def path_of(value: Any, name: str) -> Path:
    """Return an argument, which may be a run, as a path."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        shown = repr(value) if isinstance(value, str) else f"of type {type(value).__name__}"
        raise UserError(f"{name} is {shown}; it must be a path, or a run.")
    return Path(os.fspath(value))


def one_line_errors(function: Callable[P, T]) -> Callable[P, T]:
    """Show an uncaught `UserError` as one line, in which settings are named as arguments."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            with no_exit():
                return function(*args, **kwargs)
        except UserError as error:
            error.in_python = True
            if sys.excepthook is sys.__excepthook__:  # keep a hook that somebody else has set
                sys.excepthook = _show
                traceback.clear_frames(error.__traceback__)  # they may hold the error itself
                weakref.finalize(error, _give_back).atexit = False
            raise

    return called


def _give_back() -> None:
    """Restore Python's hook once the caught error is gone."""
    if sys.excepthook is _show:
        sys.excepthook = sys.__excepthook__


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, UserError):
        place = raised_at(error)
        sys.stderr.write(f"samestep: {error}{place and f' [called{place}]'}\n")
    else:
        sys.__excepthook__(kind, error, trace)
