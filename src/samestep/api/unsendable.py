"""Find what in a recipe cannot be sent to another process, and say what to write instead."""

import functools
import io
import types
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import cloudpickle

from samestep.errors import defined_at
from samestep.recipe import Recipe

_DEEPEST = 8


def why_not(recipe: Recipe | None, keywords: Mapping[str, Any], error: Exception) -> str:
    """Return what the user is told of a call that cannot be sent.

    Args:
        recipe: that of the call, if it was handed over as an object.
        keywords: its settings and options.
        error: what cloudpickle raised.
    """
    parts = {name: (f"{name}=", value) for name, value in keywords.items()}
    if recipe is not None:
        named = {f.name: getattr(recipe, f.name) for f in fields(recipe)}
        parts |= {name: (f"Recipe({name}=…)", value) for name, value in named.items()}
    for what, value in parts.values():
        if not _goes(value):
            name, culprit = _culprit(value, "")
            place = defined_at(value) if callable(value) else ""
            uses = f"{what}{place} uses {name!r}, " if name else f"{what} is "
            return (
                f"{uses}{_kind(culprit)}, which cannot be sent to the processes of the ranks. "
                f"{_instead(culprit)}, or train with nproc=1."
            )
    return f"The recipe cannot be sent to the processes of the ranks: {error}."


def _culprit(value: Any, name: str) -> tuple[str, Any]:
    """Return the innermost object that does not go, and the name that the user gave it."""
    for _ in range(_DEEPEST):
        found = next(((n, part) for n, part in _parts(value) if not _goes(part)), None)
        if found is None:
            break
        name, value = found[0] or name, found[1]
    return name, value


def _goes(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object is made of, with the names that there are."""
    if isinstance(value, functools.partial):
        yield from (("", part) for part in (value.func, *value.args))
        yield from value.keywords.items()
    elif isinstance(value, types.MethodType):
        yield from (("", value.__func__), ("self", value.__self__))
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # it is not assigned yet
                continue
        used = _names(value.__code__)
        yield from ((name, part) for name, part in value.__globals__.items() if name in used)
        yield from (("", part) for part in value.__defaults__ or ())
        yield from (value.__kwdefaults__ or {}).items()
    elif isinstance(value, type):
        yield from ((name, part) for name, part in vars(value).items() if callable(part))
    elif isinstance(value, Mapping):
        yield from ((str(key), part) for key, part in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from (("", part) for part in value)
    else:
        yield from getattr(value, "__dict__", {}).items()


def _names(code: types.CodeType) -> set[str]:
    """Return the global names that a function, or one inside of it, may use."""
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return {*code.co_names}.union(*map(_names, inner))


def _kind(culprit: Any) -> str:
    if isinstance(culprit, io.IOBase | io.TextIOBase):
        name = getattr(culprit, "name", None)
        return f"an open file ({name})" if name else "an open file"
    if isinstance(culprit, types.GeneratorType):
        return "a generator"
    kind = type(culprit)
    return f"an object of type {kind.__module__}.{kind.__qualname__}"


def _instead(culprit: Any) -> str:
    if isinstance(culprit, io.IOBase | io.TextIOBase):
        return "Keep its path, and open it inside the function"
    if isinstance(culprit, types.GeneratorType):
        return "Make it inside the function, or keep what it yields in a list"
    return "Make it inside the function that uses it"
