"""Shared by all public functions, without torch: types of arguments, and errors in one line."""

import functools
import inspect
import math
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ParamSpec,
    Protocol,
    TypeVar,
    cast,
    get_args,
    get_origin,
    overload,
)

from samestep.base.errors import UserError, no_exit, raised_at
from samestep.base.flags import InShell
from samestep.base.settings import MERGED, Settings, flag_name

if TYPE_CHECKING:
    from samestep.core.recipe import Recipe

    @dataclass(frozen=True, kw_only=True)
    class GivenSettings(Settings):
        """Settings as they may be given: the merged ones, too."""

        eval_every: str = ""
        checkpoint_every: str = ""
else:
    GivenSettings = Settings

P = ParamSpec("P")
S = ParamSpec("S")
T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)
AnyPath = str | os.PathLike[str]


RunPath = Annotated[AnyPath, InShell("RUN")]
SeveralRuns = Annotated[AnyPath, InShell("RUN…")]
FilePaths = Annotated[AnyPath | Iterable[AnyPath], InShell("FILE…", tuple[Path, ...])]
Folder = Annotated[AnyPath | None, InShell("DIR")]
CheckpointName = Annotated[str, InShell("best|last|NAME", is_flag=True)]
AnyRecipe = Annotated["Recipe | AnyPath | None", InShell("FILE.py", Path | None)]
Numbers = Annotated[str | int | Sequence[int] | None, InShell("N,N,…", str | None)]
Names = Annotated[str | Sequence[str], InShell("NAMES", str | None)]


class WithSettings(Protocol[P, S, R_co]):
    """A function with arguments of its own, for which editors also complete the settings."""

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __call__(self, what: Any, /, *args: S.args, **settings: S.kwargs) -> R_co: ...


def with_settings(
    settings: Callable[S, Settings],
) -> Callable[[Callable[P, T]], WithSettings[P, S, T]]:
    """List all settings in a function's signature, for editors, `help()` and notebooks."""
    more = inspect.signature(settings).parameters.values()

    def listed(function: Callable[P, T]) -> WithSettings[P, S, T]:
        signature = inspect.signature(function)
        *own, rest = signature.parameters.values()
        merged = (rest.replace(name=p, kind=rest.KEYWORD_ONLY, default=None) for p in MERGED)
        named = [*own, *(p for p in [*more, *merged] if p.name not in signature.parameters)]
        named.append(rest.replace(name="options", annotation=Any))
        vars(function)["__signature__"] = signature.replace(parameters=named)
        return cast("WithSettings[P, S, T]", function)

    return listed


def path_of(value: Any, name: str) -> Path:
    """Return an argument, which may be a run, as a path."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        shown = repr(value) if isinstance(value, str) else f"of type {type(value).__name__}"
        raise UserError(f"{name} is {shown}; it must be a path, or a run.")
    return Path(os.fspath(value))


def check_positive(**arguments: Any) -> None:
    """Check that numbers that were given are above 0."""
    for name, value in arguments.items():
        if value is not None and not (isinstance(value, int | float) and 0 < value < math.inf):
            least = "1 or more" if isinstance(value, int) else "greater than 0"
            raise UserError(f"--{flag_name(name)} is {value}; it must be {least}.", flags=[name])


def numbers(name: str, value: Any, least: int = 1, most: float = math.inf) -> tuple[int, ...]:
    """Return the distinct numbers of `1,2,4`, or of a list, in ascending order."""
    if value is None:
        return ()
    if not isinstance(value, Sequence):
        value = [value]
    words = [str(word).strip() for word in (value.split(",") if isinstance(value, str) else value)]
    if not words or not all(word.isdecimal() and least <= int(word) <= most for word in words):
        span = f"from {least}" if most == math.inf else f"from {least} to {most}"
        raise UserError(
            f"--{flag_name(name)} {','.join(words)}: write whole numbers {span}, as in 1,2,4.",
            flags=[name],
        )
    return tuple(sorted({int(word) for word in words}))


def one_line_errors(function: Callable[P, T]) -> Callable[P, T]:
    """Show an uncaught `UserError` as one line, in which settings are named as arguments."""

    @functools.wraps(function)
    def in_one_line(*args: P.args, **kwargs: P.kwargs) -> T:
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

    signature = inspect.signature(function)
    named = [p.replace(annotation=_in_python(p)) for p in signature.parameters.values()]
    vars(in_one_line)["__signature__"] = signature.replace(parameters=named)
    return in_one_line


def _in_python(parameter: inspect.Parameter) -> Any:
    """Return the type of a parameter for `help()`, without what it is in the shell."""
    if get_origin(kind := parameter.annotation) is not Annotated:
        return kind
    return getattr(get_args(kind)[0], "__forward_arg__", get_args(kind)[0])


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
