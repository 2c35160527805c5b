"""Checks of what a recipe is given, and of what its model() returned, before anything is trained.

They take plain values, so that a `Recipe` itself stays a table of what it has.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from samestep.base.errors import UserError, blame, did_you_mean
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
        if (given := getattr(recipe, key)) is not None:
            _check_function(f"Recipe({key}=…)", given)


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


def _check_function(what: str, given: Any) -> None:
    if isinstance(given, type) and issubclass(given, _MADE):
        raise _is_class(what, given)
    if not callable(given):
        raise UserError(f"{what} takes a function, not {given!r:.80}.")


def _is_class(what: str, given: type) -> UserError:
    name = given.__name__
    remedy = f"write {name}(…), which makes one"
    if issubclass(given, torch.optim.Optimizer):
        remedy = "write a function (model, settings) that returns one"
    if issubclass(given, torch.optim.lr_scheduler.LRScheduler):
        remedy = f"write schedule=lambda optimizer: {name}(optimizer, …)"
    return UserError(f"{what} is the class {name}; {remedy}.")


def shown(found: object) -> str:
    """Return what a function returned, for a message: most often the `return` was forgotten."""
    if found is None:
        return "None (is a `return` missing?)"
    return f"the class {found.__name__}" if isinstance(found, type) else f"a {type(found).__name__}"


def check_shard(shard: object) -> None:
    """Check that blocks are named by the classes of their modules."""
    classes = shard if isinstance(shard, tuple | list) else (None,)
    if not all(isinstance(one, type) and issubclass(one, nn.Module) for one in classes):
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
    made = f"The recipe's model() returned a {type(model).__name__}"
    lazy = [name for name, parameter in named.items() if is_lazy(parameter)]
    if lazy:
        raise UserError(
            f"The recipe's model() returns lazy layers: {', '.join(lazy[:3])} have no shape yet. "
            "Name their sizes (nn.Linear in place of nn.LazyLinear), or call the model on one "
            "sample before you return it."
        )
    if not named:
        raise UserError(f"{made} without parameters to train.")
    if not any(p.requires_grad for p in named.values()):
        raise UserError(
            f"{made} whose parameters are all frozen. Leave some to train: "
            "parameter.requires_grad_(True)."
        )
    for name, tensor in (*model.named_buffers(), *named.items()):
        if tensor.is_meta and not on_meta:
            raise UserError(
                f"{made} whose {name} is on the meta device, and has no numbers. Build it on the "
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


def check_names(what: str, names: Collection[Any], taken: Collection[str]) -> None:
    """Check that the names that a function of the recipe returned are free."""
    for name in names:
        if not (isinstance(name, str) and name and name.isprintable()):
            raise UserError(
                f"The recipe's {what} returned the name {name!r}; a name is a word that can be "
                "printed, such as 'kl'."
            )
        if name in taken:
            raise UserError(
                f"The recipe's {what} returned the name {name!r}, and a record or a metric has "
                f"that already. Give it another name, such as 'own_{name}'."
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
    """Check that the metrics' names are free, and that only metrics are named a second time.

    With `named_later` a function will return more of them.
    """
    if not isinstance(metrics, Mapping):
        raise UserError(
            f"Recipe(metrics=…) is a {type(metrics).__name__}; it takes a dict of names: "
            "metrics={'error': my_function}."
        )
    for name, metric in metrics.items():
        if not (isinstance(name, str) and name and name.isprintable()):
            raise UserError(
                f"Recipe(metrics=…) names a metric {name!r}; a name is a word that can be "
                "printed, such as 'f1'."
            )
        if not hasattr(metric, "compute"):  # training/metrics.py checks those
            _check_function(f"Recipe(metrics=…): {name!r}", metric)
        elif isinstance(metric, type):
            raise _is_class(f"Recipe(metrics=…): {name!r}", metric)
        if name in TAKEN_NAMES:
            raise UserError(
                f"Recipe(metrics=…) names a metric {name!r}, and a record has that already. "
                f"Give it another name, such as 'own_{name}'."
            )
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
