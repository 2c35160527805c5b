"""A mistake of the user's is one line, in a script and in a notebook: no traceback of ours."""

import functools
import re
import sys
import traceback
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, TypeVar

from samestep.errors import UserError, no_exit, raised_at

P = ParamSpec("P")
T = TypeVar("T")

# What IPython calls the code of a cell.
_CELL = re.compile(
    r"(?P<file>[^\s(]*[/\\]ipykernel_\d+[/\\]\d+\.py|<ipython-input-[^>]+>):(?P<line>\d+)"
)


# A command up to its end, or a flag outside of one.
_FLAG = re.compile(r"\b(?:samestep|torchrun|pip) [a-z][^.;:]*|--(?P<flag>[a-z][a-z0-9-]+)")


def one_line(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function whose `UserError` is shown as one line, where nobody catches it."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            with no_exit():
                return function(*args, **kwargs)
        except UserError as error:
            error.args = (_FLAG.sub(_argument, _CELL.sub(_cell, str(error))),)
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


def _argument(found: re.Match[str]) -> str:
    """Return what a flag is called here; in a command it stays as it is."""
    return found["flag"].replace("-", "_") if found["flag"] else found[0]


def _cell(place: re.Match[str]) -> str:
    """Return how a notebook's reader knows the place."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    named = shell and shell.compile.format_code_name(place["file"])
    return f"{named[1]} line {place['line']}" if named else place[0]


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, UserError):
        place = raised_at(error)
        sys.stderr.write(f"samestep: {error}{place and f' [called{place}]'}\n")
    else:
        sys.__excepthook__(kind, error, trace)
