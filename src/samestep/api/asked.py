"""From the arguments of a call in Python to the request that a command line would make."""

import inspect
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from samestep.errors import UserError
from samestep.recipe import Recipe, find_recipe
from samestep.run.directory import is_run
from samestep.session.request import Draft, Request, draft, finish, own_recipe, typed
from samestep.settings import Settings, merge_layers

P = ParamSpec("P")
T = TypeVar("T")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_UNNAMED = "recipe"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a call asks for; ranks that it starts are sent the same."""

    target: str | None
    """A recipe's name, its file, or the directory of a run; None for a recipe of its own."""
    recipe: Recipe | None = None
    """Handed over as an object: instead of a target, or for a run that has no file of it."""
    keywords: Mapping[str, Any] = field(default_factory=dict)
    """Settings and the recipe's options."""
    config: Path | None = None
    resume: bool = False
    allow_change: tuple[str, ...] = ()
    recipe_of_run: bool = False


def with_settings(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function whose signature names all settings: for `help()` and for completion."""
    signature = inspect.signature(function)
    *own, rest = signature.parameters.values()
    more = [
        inspect.Parameter(
            one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=one.type
        )
        for one in fields(Settings)
        if one.name not in signature.parameters
    ]
    named = [*own, *more, rest.replace(name="options")]
    vars(function)["__signature__"] = signature.replace(parameters=named)
    return function


def asked_of(
    what: "str | os.PathLike[str] | Recipe",
    recipe: "Recipe | str | os.PathLike[str] | None" = None,
    **more: Any,
) -> Asked:
    """Return what a call asks for.

    Args:
        what: a recipe, by its name, its file or itself; or the directory of a run.
        recipe: the run's, where it is to be another than the one that the run names.
        more: the other fields of `Asked`.

    Raises:
        UserError: it is none of these.
    """
    if isinstance(what, Recipe):
        if recipe is not None:
            raise UserError("Two recipes were given: leave recipe= out, or name a run first.")
        return Asked(target=None, recipe=named(what), **more)
    if not isinstance(what, str | os.PathLike):
        raise UserError(
            f"The first argument is of type {type(what).__name__}; it must be a recipe (its name, "
            "its file ending in .py, or a samestep.Recipe) or the directory of a run."
        )
    target = os.fspath(what)
    if not target:
        raise UserError("The first argument is empty: name a recipe, a recipe file or a run.")
    if recipe is not None and not is_run(Path(target)):
        raise UserError(f"recipe= goes with the directory of a run, and {target} is none.")
    return Asked(target=target, recipe=given_recipe(recipe, what), **more)


def given_recipe(
    recipe: "Recipe | str | os.PathLike[str] | None", run: object = None
) -> Recipe | None:
    """Return a recipe that a caller gives as an object, by name or by file; or that a run has.

    Raises:
        UserError: there is no such recipe.
    """
    if recipe is None:
        recipe = getattr(run, "recipe", None)
    if recipe is None or isinstance(recipe, Recipe):
        return None if recipe is None else named(recipe)
    return find_recipe(os.fspath(recipe))


def named(recipe: Recipe) -> Recipe:
    """Return a recipe with a name: its run directories and records begin with it.

    Raises:
        UserError: its name is none that a file can have.
    """
    if not recipe.name:
        return replace(recipe, name=_UNNAMED)
    if not _NAME.fullmatch(recipe.name):
        raise UserError(
            f"Recipe(name={recipe.name!r}): use letters, digits, '_', '-' and '.'; run directories "
            "are called after it."
        )
    return recipe


def request_of(asked: Asked, verb: str = "train") -> Request:
    """Return the request that a call makes.

    Args:
        asked: the call.
        verb: the name of the function, for messages.

    Raises:
        UserError: anything in it is wrong.
    """
    recipe, where = asked.recipe, f"samestep.{verb}()"
    if asked.recipe_of_run:
        if not asked.resume:
            raise UserError(f"{where}: recipe_of_run has no effect without resume=True.")
        recipe = own_recipe(asked.target, asked.keywords.get("run_dir")) or recipe
    start = draft(asked.target, asked.config, recipe)
    given = {name: _plain(value) for name, value in asked.keywords.items()}
    settings, options = typed(given, start.recipe, where)
    return finish(
        start,
        Settings(**merge_layers(start.settings_layer, settings)),  # type: ignore[arg-type]
        _options(start, options),
        given={*settings, *options},
        resume=asked.resume,
        allow_change=",".join(asked.allow_change) or None,
    )


def _options(start: Draft, given: dict[str, object]) -> Any:
    options = start.options()
    return replace(options, **given) if given else options


def _plain(value: Any) -> Any:
    """Return a path as text, and a number of NumPy as Python's."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return value.item()
    return value
