"""A mistake of the user's is one line, in a script and in a notebook: no traceback of ours."""

import functools
import sys
import traceback
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, TypeVar

from samestep.errors import UserError, no_exit, raised_at

P = ParamSpec("P")
T = TypeVar("T")


def one_line(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function whose `UserError` is shown as one line, where nobody catches it."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            with no_exit():
                return function(*args, **kwargs)
        except UserError as error:
            error.in_python = True
            if sys.excepthook is sys.__excepthook__:  # another one is somebody else's
                sys.excepthook = _show
                traceback.clear_frames(error.__traceback__)  # they may hold the error itself
                weakref.finalize(error, _give_back).atexit = False
            raise

    return called


def _give_back() -> None:
    """Let Python show errors as before, now that somebody has caught the error and is done."""
    if sys.excepthook is _show:
        sys.excepthook = sys.__excepthook__


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, UserError):
        place = raised_at(error)
        sys.stderr.write(f"samestep: {error}{place and f' [called{place}]'}\n")
    else:
        sys.__excepthook__(kind, error, trace)
