"""Turn the arguments of a call in Python into a request, as the command line does."""

import multiprocessing
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from samestep.base.errors import UserError
from samestep.base.run.directory import is_run
from samestep.base.settings import Settings, merge_layers
from samestep.base.startup import PARENT
from samestep.core.recipe import Recipe, being_read, find_recipe
from samestep.core.session.declared import plain_value, typed
from samestep.core.session.request import Request, draft, finish, own_recipe
from samestep.core.training.alike import random_numbers
from samestep.core.training.device import outside_autocast
from samestep.launch.ranks.process import TASK
from samestep.launch.ranks.world import in_process_group
from samestep.shell.api.arguments import AnyPath, AnyRecipe

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True, kw_only=True)
class Call:
    """The arguments of a call; the ranks that it starts are sent the same."""

    target: str | None
    """A recipe's name, its file, or the directory of a run; None if `recipe` is given instead."""
    recipe: Recipe | None = None
    """Instead of a target, or for a run that has no file of it."""
    keywords: Mapping[str, Any] = field(default_factory=dict)
    """Settings and the recipe's options."""
    config: Path | None = None
    resume: bool | str = False
    allow_change: tuple[str, ...] = ()
    recipe_of_run: bool = False


def call_of(
    what: str | os.PathLike[str] | Recipe,
    recipe: AnyRecipe = None,
    *,
    config: AnyPath | None = None,
    **more: Any,
) -> Call:
    """Check the first arguments of a call; `more` are the other fields of `Call`."""
    more["config"] = None if config is None else Path(config)
    if isinstance(what, Recipe):
        if recipe is not None:
            raise UserError("Two recipes were given: leave recipe= out, or name a run first.")
        return Call(target=None, recipe=_named(what), **more)
    if not isinstance(what, str | os.PathLike):
        raise UserError(
            f"The first argument is of type {type(what).__name__}; it must be a recipe (its name, "
            "its file ending in .py, or a samestep.Recipe) or the directory of a run."
        )
    target = os.fspath(what)
    if not target:
        raise UserError("The first argument is empty: name a recipe, a recipe file or a run.")
    if recipe is not None and not is_run(Path(target)):
        raise UserError(
            f"recipe= needs the directory of a run, and {target} is not one. Leave recipe= out."
        )
    return Call(target=target, recipe=given_recipe(recipe, what), **more)


def given_recipe(recipe: AnyRecipe, run: object = None) -> Recipe | None:
    """Return the recipe given as an object, name or file; without one, the run's own."""
    if recipe is None:
        recipe = getattr(run, "recipe", None)
    if recipe is None or isinstance(recipe, Recipe):
        return None if recipe is None else _named(recipe)
    return find_recipe(os.fspath(recipe))


def _named(recipe: Recipe) -> Recipe:
    """Give a recipe a name if it has none: run directories begin with it."""
    if not recipe.name:
        return replace(recipe, name="recipe")
    if not _NAME.fullmatch(recipe.name):
        raise UserError(
            f"Recipe(name={recipe.name!r}): use letters, digits, '_', '-' and '.'; run directories "
            "are called after it."
        )
    return recipe


def request_of(call: Call, function: str = "train") -> Request:
    """Return the request that a call makes; messages name the function."""
    recipe, where = call.recipe, f"samestep.{function}()"
    if call.recipe_of_run:
        if not call.resume:
            raise UserError(f"{where}: recipe_of_run has no effect without resume=True.")
        recipe = own_recipe(call.target, call.keywords.get("run_dir")) or recipe
    start = draft(call.target, call.config, recipe)
    given = {name: plain_value(value) for name, value in call.keywords.items()}
    settings, options = typed(given, start.recipe, where)
    below = start.options()
    return finish(
        start,
        Settings(**merge_layers(start.settings_layer, settings)),  # type: ignore[arg-type]
        replace(below, **options) if options else below,
        given={*settings, *options},
        resume=call.resume,
        allow_change=",".join(call.allow_change) or None,
    )


def check_may_start(function: str) -> None:
    """Refuse a call in a process that is itself a rank, a spawned child or a reader of a recipe.

    There it would start ranks endlessly.
    """
    name, where = f"samestep.{function}()", ""
    if (file := being_read()) is not None:
        where = f"while {file} was read as a recipe"
    elif PARENT in os.environ or TASK in os.environ:
        where = "in a rank that it has started"
    elif getattr(multiprocessing.current_process(), "_inheriting", False):
        where = "in a process that is starting"
    if where:
        raise UserError(
            f"{name} was called {where}.",
            remedy='Put the call under `if __name__ == "__main__":`, so that a process that only '
            "reads this file does not run it.",
        )
    if in_process_group():
        raise UserError(
            f"{name} makes its own process group, and this process is already in one. Call "
            "torch.distributed.destroy_process_group() first, or use samestep.open_run() for a "
            "loop of your own in it."
        )


@contextmanager
def as_in_fresh_process() -> Iterator[None]:
    """Compute with PyTorch's default modes; restore modes, random numbers and threads afterwards.

    A caller's `no_grad`, autocast, default type or device would change the training.
    """
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    try:
        with ExitStack() as stack:
            stack.enter_context(random_numbers(0))
            stack.enter_context(torch.inference_mode(mode=False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(outside_autocast())
            if torch.get_default_device().type != "cpu":
                stack.enter_context(torch.device("cpu"))
            torch.set_default_dtype(torch.float32)
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
