"""What the code of a recipe says: which functions take its options, which options are unread."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields
from functools import partial
from typing import Any

from samestep.base.errors import UserError, defined_at, did_you_mean, listed

OTHERS: Mapping[str, int] = {
    "model": 0,
    "data": 0,
    "complete": 0,
    "baselines": 0,
    "read": 1,
    "plot": 3,
    "loss": 2,
    "evaluation_loss": 2,
    "loss_terms": 1,
    "collate": 1,
    "weights": 1,
    "lengths": 1,
    "forward": 2,
    "carry": 1,
    "transform": 1,
    "augment": 2,
    "batch_transform": 2,
    "optimizer": 2,
    "schedule": 2,
    "metrics": 2,
    "after_epoch": 2,
    "evaluate_batch": 2,
    "pictures": 2,
    "show": 2,
}
"""Each function of a recipe → how many arguments it gets, not counting the options."""
SCHEDULE_NAMES = ("epoch", "steps_per_epoch", "metrics")
"""What a schedule of factors is given in addition to (step, total), if it names them."""
MOMENT_NAMES = ("step", "epoch")
"""What a loss or forward is given in addition to its two arguments, if it names them."""
SCHEDULER_NAMES = ("optimizer", "plan")
"""What a schedule that makes a scheduler of PyTorch is called with; by `optimizer` it is known."""
_OPTIONS_FIRST = frozenset({"model", "data", "complete", "baselines", "read", "plot"})
"""These may call them by another name, as the first of their parameters."""
_HAS_OPTIONS = "has_options"

_script_words: ContextVar[list[tuple[str, ...]] | None] = ContextVar("script_words", default=None)
"""Arguments for a script that builds a Trainer, until it takes them."""


def take_script_words() -> tuple[str, ...]:
    """Return the arguments for a script that builds a Trainer, which is read now."""
    words = _script_words.get()
    return words.pop() if words else ()


@contextmanager
def with_script_words(words: Iterable[str]) -> Iterator[None]:
    """Give a script that is read within this its arguments; a recipe takes none."""
    waiting = [tuple(words)]
    token = _script_words.set(waiting)
    try:
        yield
    finally:
        _script_words.reset(token)
    if waiting and waiting[0]:
        raise UserError(
            f"Only a script that builds a Trainer takes arguments after `--`: {waiting[0][0]!r}. "
            "The options of a recipe are flags: leave `--` out."
        )


def without_options(function: Any) -> Any:
    """Return a function of a recipe as the recipe has it."""
    given = isinstance(function, partial) and _HAS_OPTIONS in vars(function)
    return function.func if given else function


def with_options(name: str, function: Any, options: object) -> Any:
    """Return a function of a recipe, which has the options if it asks for them.

    Those that it has already may have been completed since.
    """
    function = without_options(function)
    asked = _asked(name, function)
    if asked is None or (options is None and name not in ("read", "plot")):
        return function
    is_first = asked == next(iter(inspect.signature(function).parameters))
    given = partial(function, options) if is_first else partial(function, options=options)
    vars(given)[_HAS_OPTIONS] = True  # no class of its own: torch.compile knows a plain partial
    return given


def all_with_options(recipe: Any, options: object) -> dict[str, Any]:
    """Return the fields of a recipe that hold functions, each with the options if it asks."""
    found: dict[str, Any] = {}
    for name in OTHERS:
        value = getattr(recipe, name)
        if isinstance(value, Mapping):
            found[name] = {key: with_options(name, one, options) for key, one in value.items()}
        elif callable(value):  # some may be numbers instead
            found[name] = with_options(name, value, options)
    return found


def unread_options(recipe: Any) -> tuple[list[str], list[str]]:
    """Return the options that no function of a recipe reads, and the functions without options.

    A function that hands the options on as a whole may read any of them.
    """
    known = [one.name for one in fields(recipe.options)]
    read: set[str] = set()
    without: list[str] = []
    for kind in recipe.options.__mro__[:-1]:
        names = _names_in(kind, "self", but="__post_init__")
        if names is None or "__dict__" in names:
            return [], []
        read |= names
    for name in OTHERS:
        value = getattr(recipe, name)
        for function in value.values() if isinstance(value, Mapping) else [value]:
            asked = None if function is None else _asked(name, function)
            if asked is None:
                without += [name] if callable(function) else []
                continue
            # Of a class, what takes the options may be inherited.
            names = _names_in(function.__init__ if inspect.isclass(function) else function, asked)
            if names is None or names - {*known, *dir(recipe.options)} or "__dict__" in names:
                return [], []
            read |= names
    return [name for name in known if name not in read], without


def schedule_asks(schedule: Any) -> tuple[str, ...]:
    """Return what a recipe's schedule asks for by name; with `optimizer` it makes a scheduler.

    A default of a positional parameter is the recipe's own value, and is left as it is.
    """
    try:
        found = inspect.signature(schedule).parameters
    except (TypeError, ValueError):  # compiled functions do not say
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    given = {"options", *(schedule.keywords if isinstance(schedule, partial) else ())}
    free = {n: p for n, p in found.items() if n not in given and p.kind.name[:3] != "VAR"}
    makes = "optimizer" in free
    if not makes and "plan" in free:
        raise UserError(
            f"The recipe's schedule{defined_at(schedule)} asks for `plan`, which only one that "
            "makes a scheduler of PyTorch is given.",
            remedy="Name its other parameter `optimizer`: schedule=lambda optimizer, plan: …",
        )
    if not makes:  # the first two are (step, total)
        for name in [n for n, p in free.items() if p.kind in kinds][:2]:
            del free[name]
    known = SCHEDULER_NAMES if makes else SCHEDULE_NAMES
    required = [n for n, p in free.items() if p.default is p.empty]
    if unknown := [name for name in required if name not in known]:
        called = "the optimizer" if makes else "(step, total steps)"
        raise UserError(
            f"The recipe's schedule{defined_at(schedule)} asks for {listed(unknown)}. It is called "
            f"with {called}, and by name with what it asks for of {', '.join(known)}. "
            f"{did_you_mean(unknown[0], known)}".rstrip(),
            remedy="Rename the parameter, or give it a default.",
        )
    by_name = [n for n, p in free.items() if makes or p.kind is p.KEYWORD_ONLY]
    return tuple(name for name in known if name in (*required, *by_name))


def moment_asks(function: Any) -> tuple[str, ...]:
    """Return what a recipe's loss or forward asks for by name, after its two arguments."""
    try:
        found = inspect.signature(getattr(function, "forward", function)).parameters
    except (TypeError, ValueError):  # compiled functions do not say
        return ()
    given = function.keywords if isinstance(function, partial) else {}
    first = [n for n, p in found.items() if p.kind is not p.KEYWORD_ONLY][:2]
    return tuple(n for n in MOMENT_NAMES if n in found and n not in (*first, *given))


def _asked(name: str, function: Any) -> str | None:
    """Return what a function calls its parameter for the options; None if it has none."""
    try:
        parameters = inspect.signature(without_options(function)).parameters
    except (TypeError, ValueError):  # compiled functions do not say
        return None
    if "options" in parameters:
        return "options"
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [n for n, p in parameters.items() if p.kind in kinds and p.default is p.empty]
    any_number = [n for n, p in parameters.items() if p.kind is p.VAR_POSITIONAL]
    if name in _OPTIONS_FIRST and (len(needed) > OTHERS[name] or any_number):
        return (needed or any_number)[0]
    return None


def _assigns(function: ast.FunctionDef) -> bool:
    """Whether a function sets attributes: fields that it derives from others use those."""
    attributes = [node for node in ast.walk(function) if isinstance(node, ast.Attribute)]
    return any(a.attr == "__setattr__" or isinstance(a.ctx, ast.Store) for a in attributes)


def _names_in(code: Callable[..., Any], name: str, but: str = "") -> set[str] | None:
    """Return the attributes of a variable that code reads; None if it may read any of them."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):  # there is no source, or a lambda's line is cut
        return None
    left_out: Collection[ast.AST] = [
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == but and not _assigns(node)
        for inner in ast.walk(node)
    ]
    uses, read = 0, list[str]()
    for node in ast.walk(tree):
        match node:
            case _ if node in left_out:
                continue
            case ast.Name(id=found) if found == name:
                uses += 1
            case ast.Attribute(value=ast.Name(id=found), attr=attribute) if found == name:
                read.append(attribute)
    return {*read} if len(read) == uses else None
