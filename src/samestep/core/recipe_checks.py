"""What a recipe is given: checks before anything is trained, and what its code says.

The checks take plain values, so that a `Recipe` itself stays a table of what it has. The code says
which functions take the recipe's options, and which options are unread.
"""

import ast
import inspect
import math
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import MISSING, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from samestep.base.errors import UserError, blame, defined_at, did_you_mean, listed
from samestep.base.run.records import TAKEN_NAMES

PICTURE_NAMES = ("confusion", "predictions", "regression", "samples")
"""What no picture of a recipe's own may be called: samestep's have these names."""

_FUNCTIONS = (
    *("loss", "loss_terms", "collate", "forward", "optimizer", "schedule", "transform", "augment"),
    *("carry", "evaluate_batch", "complete", "read", "show", "plot", "baselines"),
    *("evaluation_loss", "after_epoch", "batch_transform", "on_record"),
)
"""Fields of a recipe that are functions, or objects that can be called."""
_MADE = (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)


def check_functions(recipe: object) -> None:
    """Check what a recipe is given as functions."""
    for key in ("model", "data"):
        builder = getattr(recipe, key)
        if isinstance(builder, nn.Module) or not callable(builder):
            raise UserError(
                f"Recipe({key}=…) takes a function that builds it, not "
                f"{type(builder).__name__}: write a function and pass its name."
            )
    for key in _FUNCTIONS:
        if (function := getattr(recipe, key)) is not None:
            _check_function(f"Recipe({key}=…)", function)


def check_batch_fields(recipe: Any, over: tuple[str, ...]) -> None:
    """Check what a recipe says of the whole batch: a loss over it, or state of its slots."""
    if recipe.loss_over not in over:
        raise UserError(f"Recipe(loss_over={recipe.loss_over!r}) is none of {', '.join(over)}.")
    if recipe.loss_over == "batch" and recipe.loss_terms is not None:
        raise UserError(
            'Recipe(loss_over="batch") sees the whole batch and divides by itself: leave out '
            "loss_terms."
        )
    if recipe.carry is not None and recipe.forward is None:
        raise UserError(
            "Recipe(carry=…) needs a forward(model, batch, carried) that returns (outputs, "
            "carried)."
        )


def _check_function(field: str, value: Any) -> None:
    if isinstance(value, type) and issubclass(value, _MADE):
        raise _is_class(field, value)
    if not callable(value):
        raise UserError(f"{field} takes a function, not {value!r:.80}.")


def _is_class(field: str, kind: type) -> UserError:
    name = kind.__name__
    remedy = f"write {name}(…), which makes one"
    if issubclass(kind, torch.optim.Optimizer):
        remedy = "write a function (model, settings) that returns one"
    if issubclass(kind, torch.optim.lr_scheduler.LRScheduler):
        remedy = f"write schedule=lambda optimizer: {name}(optimizer, …)"
    return UserError(f"{field} is the class {name}; {remedy}.")


def shown(value: object) -> str:
    """Describe a returned value for a message: most often the `return` was forgotten."""
    if value is None:
        return "None (is a `return` missing?)"
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def check_shard(shard: object) -> None:
    """Check that blocks are named by the classes of their modules."""
    classes = shard if isinstance(shard, tuple | list) else (None,)
    if not all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in classes):
        raise UserError(
            f"Recipe(shard={shard!r:.80}) takes the classes of the model's blocks, in a tuple: "
            "shard=(Block,)."
        )


def check_model(model: object, *, on_meta: bool = False) -> None:
    """Check that what model() returned can be trained; `on_meta` if it was asked for no numbers."""
    if not isinstance(model, nn.Module):
        raise UserError(
            f"The recipe's model() returned {shown(model)}; it must return an nn.Module with "
            "parameters to train."
        )
    named = dict(model.named_parameters())
    what = f"The recipe's model() returned a {type(model).__name__}"
    if lazy := [name for name, parameter in named.items() if is_lazy(parameter)]:
        raise UserError(
            f"The recipe's model() returns lazy layers: {', '.join(lazy[:3])} have no shape yet. "
            "Name their sizes (nn.Linear in place of nn.LazyLinear), or call the model on one "
            "sample before you return it."
        )
    if not named:
        raise UserError(f"{what} without parameters to train.")
    if not any(p.requires_grad for p in named.values()):
        raise UserError(
            f"{what} whose parameters are all frozen. Leave some to train: "
            "parameter.requires_grad_(True)."
        )
    for name, tensor in (*model.named_buffers(), *named.items()):
        if tensor.is_meta and not on_meta:
            raise UserError(
                f"{what} whose {name} is on the meta device, and has no numbers. Build it on the "
                "CPU; samestep moves it to the device."
            )


@contextmanager
def telling_options(options: type) -> Iterator[None]:
    """Name the line of the options' own check when it refuses a value."""
    try:
        yield
    except Exception as error:
        blame("The recipe's options are refused", error, options)


def check_options(options: type, settings: set[str]) -> None:
    """Check that every option has a default, and a name of its own."""
    if not (isinstance(options, type) and is_dataclass(options)):
        raise UserError(
            f"The recipe's options are {options!r}; they must be a dataclass itself, not an "
            "object of it, with a default for each field."
        )
    for option in fields(options):
        if option.default is MISSING and option.default_factory is MISSING:
            kind = getattr(option.type, "__name__", option.type)
            raise UserError(
                f"The recipe's option {option.name!r} has no default: write "
                f"`{option.name}: {kind} = …` in the class {options.__name__}."
            )
    if both := settings & {f.name for f in fields(options)}:
        raise UserError(
            f"The recipe's option {min(both)!r} is also a setting of samestep; "
            "give it another name."
        )


def check_loss_fields(recipe: Any) -> None:
    """Check what a recipe says of its loss in addition to the function."""
    if recipe.reduction not in ("mean", "sum"):
        raise UserError(f'Recipe(reduction={recipe.reduction!r:.80}) is "mean" or "sum".')
    if recipe.reduction == "sum" and recipe.loss_terms is not None:
        raise UserError(
            'Recipe(reduction="sum", loss_terms=…): a sum is divided by nothing. Leave loss_terms '
            "out, or return the mean over the terms without reduction."
        )
    weights = {} if recipe.loss_weights is None else recipe.loss_weights
    if not isinstance(weights, Mapping):
        raise UserError(
            f"Recipe(loss_weights=…) is a {type(weights).__name__}; it takes a dict of names: "
            'loss_weights={"kl": 0.1}.'
        )
    for name, weight in weights.items():
        if not (isinstance(weight, int | float) and math.isfinite(weight)):
            raise UserError(
                f"Recipe(loss_weights=…): {name!r} weighs {weight!r:.80}; it must be a number."
            )


def check_names(who: str, names: Collection[Any], taken: Collection[str]) -> None:
    """Check that names are words that are free; `who` begins a message: "The loss returned"."""
    for name in names:
        if not (isinstance(name, str) and name and name.isprintable()):
            raise UserError(
                f"{who} the name {name!r}; a name is a word that can be printed, such as 'kl'."
            )
        if name in taken:
            raise UserError(
                f"{who} the name {name!r}, and a record or a metric has that already. Give it "
                f"another name, such as 'own_{name}'."
            )


def check_lower(lower: tuple[str, ...], measured: Collection[str]) -> None:
    """Check that what less is better of is measured."""
    for name in lower:
        if name not in ("loss", *measured):
            raise UserError(
                f"Recipe(lower_is_better={lower!r}): {name!r} is not a metric of the recipe. "
                f"{did_you_mean(name, measured)}They are: {', '.join(measured)}."
            )


def check_metrics(
    metrics: Mapping[str, Any], lower: tuple[str, ...], *, named_later: bool = False
) -> None:
    """Check that the metrics' names are free, and that only metrics are named a second time."""
    if not isinstance(metrics, Mapping):
        raise UserError(
            f"Recipe(metrics=…) is a {type(metrics).__name__}; it takes a dict of names: "
            "metrics={'error': my_function}."
        )
    check_names("Recipe(metrics=…) has", metrics, TAKEN_NAMES)
    for name, metric in metrics.items():
        if not hasattr(metric, "compute"):  # training/metrics.py checks those
            _check_function(f"Recipe(metrics=…): {name!r}", metric)
        elif isinstance(metric, type):
            raise _is_class(f"Recipe(metrics=…): {name!r}", metric)
    if isinstance(lower, str):
        raise UserError(f"Recipe(lower_is_better={lower!r}) takes a tuple of names: ({lower!r},).")
    if not named_later:
        check_lower(lower, metrics)


def check_pictures(pictures: Mapping[str, Any]) -> None:
    """Check that each picture is a function, with a name that its file can have."""
    for name, draw in pictures.items():
        fits = isinstance(name, str) and re.fullmatch(r"(?a:\w[\w-]{0,59})", name)
        if not fits or name in PICTURE_NAMES:
            raise UserError(
                f"Recipe(pictures=…) names a picture {name!r}, which cannot be a file's name "
                f"here: take letters, digits, - and _, and none of {', '.join(PICTURE_NAMES)}."
            )
        if not callable(draw):
            raise UserError(
                f"Recipe(pictures=…): {name!r} is a {type(draw).__name__}; it takes a function "
                "(model, data) that returns a matplotlib figure or HTML text."
            )


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
FROM_PYTHON = "python:"
"""Begins the source of a recipe that was handed over as an object: no file has it."""
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
            "The options of a recipe are flags: leave `--` out. Flags of a job need --slurm."
        )


def without_options(function: Any) -> Any:
    """Return a function of a recipe as the recipe has it."""
    is_bound = isinstance(function, partial) and _HAS_OPTIONS in vars(function)
    return function.func if is_bound else function


def with_options(name: str, function: Any, options: object) -> Any:
    """Return a function of a recipe, which has the options if it asks for them.

    Those that it has already may have been completed since.
    """
    function = without_options(function)
    asked = _options_parameter(name, function)
    if asked is None or (options is None and name not in ("read", "plot")):
        return function
    is_first = asked == next(iter(inspect.signature(function).parameters))
    bound = partial(function, options) if is_first else partial(function, options=options)
    vars(bound)[_HAS_OPTIONS] = True  # no class of its own: torch.compile knows a plain partial
    return bound


def all_with_options(recipe: Any, options: object) -> dict[str, Any]:
    """Return the fields of a recipe that hold functions, each with the options if it asks."""
    functions: dict[str, Any] = {}
    for name in OTHERS:
        value = getattr(recipe, name)
        if isinstance(value, Mapping):
            functions[name] = {key: with_options(name, f, options) for key, f in value.items()}
        elif callable(value):  # some may be numbers instead
            functions[name] = with_options(name, value, options)
    return functions


def unread_options(recipe: Any) -> tuple[list[str], list[str]]:
    """Return the options that no function of a recipe reads, and the functions without options.

    A function that hands the options on as a whole may read any of them.
    """
    options = [f.name for f in fields(recipe.options)]
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
            asked = None if function is None else _options_parameter(name, function)
            if asked is None:
                without += [name] if callable(function) else []
                continue
            # Of a class, what takes the options may be inherited.
            names = _names_in(function.__init__ if inspect.isclass(function) else function, asked)
            if names is None or names - {*options, *dir(recipe.options)} or "__dict__" in names:
                return [], []
            read |= names
    return [name for name in options if name not in read], without


def schedule_asks(schedule: Any) -> tuple[str, ...]:
    """Return the parameters of a recipe's schedule; with `optimizer` it makes a scheduler.

    A default of a positional parameter is the recipe's own value, and is left as it is.
    """
    try:
        parameters = inspect.signature(schedule).parameters
    except (TypeError, ValueError):  # compiled functions do not say
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    bound = {"options", *(schedule.keywords if isinstance(schedule, partial) else ())}
    free = {n: p for n, p in parameters.items() if n not in bound and p.kind.name[:3] != "VAR"}
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
    available = SCHEDULER_NAMES if makes else SCHEDULE_NAMES
    required = [n for n, p in free.items() if p.default is p.empty]
    if unknown := [name for name in required if name not in available]:
        called = "the optimizer" if makes else "(step, total steps)"
        raise UserError(
            f"The recipe's schedule{defined_at(schedule)} asks for {listed(unknown)}. It is called "
            f"with {called}, and by name with what it asks for of {', '.join(available)}. "
            f"{did_you_mean(unknown[0], available)}".rstrip(),
            remedy="Rename the parameter, or give it a default.",
        )
    by_name = [n for n, p in free.items() if makes or p.kind is p.KEYWORD_ONLY]
    return tuple(name for name in available if name in (*required, *by_name))


def moment_asks(function: Any) -> tuple[str, ...]:
    """Return the moments (`step`, `epoch`, …) that a recipe's loss or forward takes by name."""
    try:
        parameters = inspect.signature(getattr(function, "forward", function)).parameters
    except (TypeError, ValueError):  # compiled functions do not say
        return ()
    bound = function.keywords if isinstance(function, partial) else {}
    first = [n for n, p in parameters.items() if p.kind is not p.KEYWORD_ONLY][:2]
    return tuple(n for n in MOMENT_NAMES if n in parameters and n not in (*first, *bound))


def _options_parameter(name: str, function: Any) -> str | None:
    """Return the name of a function's parameter for the options; None if it has none."""
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


@contextmanager
def one_thread() -> Iterator[None]:
    """Let PyTorch compute in one thread, as in ranks that are started together: the same bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
