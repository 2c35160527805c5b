"""A call in Python: the request that its arguments make, and how ranks that it starts get it.

cloudpickle sends recipes by value, as one made in a notebook has no file. The call's file is in a
private temporary folder and is deleted when the ranks end; it is never copied into a run.
"""

import functools
import io
import json
import multiprocessing
import os
import re
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import cloudpickle
import torch

from samestep.base.errors import UserError, defined_at
from samestep.base.run.directory import is_run
from samestep.base.run.records import Record
from samestep.base.startup import PARENT
from samestep.core.learner.agreement import random_numbers
from samestep.core.learner.device import outside_autocast
from samestep.core.recipe import Recipe, being_read, find_recipe
from samestep.core.session.declared import plain_value, typed
from samestep.core.session.request import Request, draft, finish, recipe_copy_of
from samestep.launch.ranks.process import TASK
from samestep.launch.ranks.world import in_process_group
from samestep.shell.api.arguments import AnyPath, AnyRecipe
from samestep.show.progress import Nothing

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True, kw_only=True)
class Call:
    """The arguments of a call; the ranks that it starts are sent the same."""

    target: str | None
    """A recipe's name, its file, or the directory of a run; None if `recipe` is given instead."""
    recipe: Recipe | None = None  # instead of a target, or for a run that has no file of it
    keywords: Mapping[str, Any] = field(default_factory=dict)  # settings and the recipe's options
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
        raise UserError(f"recipe= needs a run's directory, and {target} is not one. Omit recipe=.")
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
            "are named after it."
        )
    return recipe


def request_of(call: Call, function: str = "train") -> Request:
    """Return the request that a call makes; messages name the function."""
    recipe, where = call.recipe, f"samestep.{function}()"
    if call.recipe_of_run:
        if not call.resume:
            raise UserError(f"{where}: recipe_of_run has no effect without resume=True.")
        recipe = recipe_copy_of(call.target, call.keywords.get("run_dir")) or recipe
    start = draft(call.target, call.config, recipe)
    plain = {name: plain_value(value) for name, value in call.keywords.items()}
    settings, options = typed(plain, start.recipe, where)
    below = start.options()
    return finish(
        start,
        settings,
        replace(below, **options) if options else below,
        named={*settings, *options},
        resume=call.resume,
        allow_change=",".join(call.allow_change) or None,
    )


def check_may_start(function: str) -> None:
    """Refuse a call in a rank, a spawned child or a reader of a recipe: it would start for ever."""
    name = f"samestep.{function}()"
    where = ""
    if (file := being_read()) is not None:
        where = f"while {file} was read as a recipe"
    elif PARENT in os.environ or TASK in os.environ:
        where = "in a rank that it has started"
    elif getattr(multiprocessing.current_process(), "_inheriting", False):
        where = "in a process that is starting"
    if where:
        raise UserError(
            f"{name} was called {where}.",
            remedy='Put the call under `if __name__ == "__main__":`, so that processes that '
            "import this file do not run it.",
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


CALL_FILE = "--call-file"  # precedes the file of a call in the arguments of a rank
RECORDS = "records.jsonl"
"""The file next to it in which rank 0 leaves the records of a training for the caller."""
_DEEPEST = 8


def send(call: Call, file: Path) -> None:
    """Write a call to a file that only this user can read."""
    buffer = io.BytesIO()
    pickler = _CallPickler(buffer)
    try:
        pickler.dump(call)
        main = cloudpickle.dumps(pickler.of_main)
    except Exception as error:
        raise UserError(_why_not(call, error)) from error
    file.touch(mode=0o600)
    # Three pickles: the caller's path comes first, as the call's imports need it.
    file.write_bytes(cloudpickle.dumps(sys.path) + main + buffer.getvalue())


def receive(file: Path) -> Call:
    """Return the call that this rank was started for."""
    with file.open("rb") as content:
        sys.path[:] = [*dict.fromkeys((*cloudpickle.load(content), *sys.path))]
        try:
            vars(sys.modules["__main__"]).update(cloudpickle.load(content))
            call = cloudpickle.load(content)
        except Exception as error:
            raise UserError(
                f"The recipe could not be read in another process: {type(error).__name__}: "
                f"{error}. Everything it uses must be importable there, or defined with the recipe."
            ) from error
    assert isinstance(call, Call)
    return call


class _CallPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Notes the classes and functions that it takes from the caller's `__main__`.

    The ranks put them into their `__main__`, so that ranks and loader workers exchange instances.
    """

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.of_main: dict[str, Any] = {}

    def reducer_override(self, value: Any) -> Any:
        named = isinstance(value, type | types.FunctionType) and value.__module__ == "__main__"
        if named and value.__qualname__ == value.__name__ != "<lambda>":
            self.of_main[value.__name__] = value
        return super().reducer_override(value)


class ScreenFile(Nothing):
    """Rank 0's screen for a caller in another process: the records, in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None  # trackers and the mirror end later, and may tell something

    def show_message(self, record: Record) -> None:
        """Append one record."""
        self._file = self._file or self._path.open("a", buffering=1, encoding="utf-8")
        self._file.write(json.dumps(record) + "\n")


def _why_not(call: Call, error: Exception) -> str:
    """Name the value that cannot be sent to another process, and what to write instead."""
    parts = [(f"{name}=", value) for name, value in call.keywords.items()]
    if call.recipe is not None:
        parts += [(f"Recipe({name}=…)", value) for name, value in vars(call.recipe).items()]
    unsendable = next((part for part in parts if not _can_be_sent(part[1])), None)
    if unsendable is None:
        return f"The recipe cannot be sent to the ranks: {error}."
    subject, value = unsendable
    place = defined_at(value) if callable(value) else ""
    name = ""  # that the user gave to the innermost object that cannot be sent
    for _ in range(_DEEPEST):
        inner = next((part for part in _named_parts(value) if not _can_be_sent(part[1])), None)
        if inner is None:
            break
        name, value = inner[0] or name, inner[1]
    kind = f"an object of type {type(value).__module__}.{type(value).__qualname__}"
    instead = "Create it inside the function that uses it"
    if isinstance(value, io.IOBase):
        named = getattr(value, "name", None)
        kind = f"an open file ({named})" if named else "an open file"
        instead = "Keep its path, and open it inside the function"
    elif isinstance(value, types.GeneratorType):
        kind = "a generator"
        instead = "Create it inside the function, or keep what it yields in a list"
    uses = f"{subject}{place} uses {name!r}, " if name else f"{subject} is "
    return f"{uses}{kind}, which cannot be sent to the ranks. {instead}, or train with nproc=1."


def _can_be_sent(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True


def _named_parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of an object, with their names if they have any."""
    if isinstance(value, functools.partial):
        yield from (("", part) for part in (value.func, *value.args))
        yield from value.keywords.items()
    elif isinstance(value, types.MethodType):
        yield from (("", value.__func__), ("self", value.__self__))
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # not assigned yet
                continue
        used = _global_names(value.__code__)
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


def _global_names(code: types.CodeType) -> set[str]:
    """Return the global names that a function, or one inside it, may use."""
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return {*code.co_names}.union(*map(_global_names, inner))
