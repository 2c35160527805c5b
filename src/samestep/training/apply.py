"""How a recipe's batch reaches its model, and what its loss is a mean over."""

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from samestep.errors import UserError, blame, defined_at
from samestep.recipe import Recipe

Terms = Callable[[Any, Any], Any]
"""(inputs, targets) → the number of what a batch's loss is a mean over."""


class Applied(nn.Module):
    """A model that is called with a batch, by the recipe's own `forward`."""

    def __init__(self, model: nn.Module, forward: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.model, self._forward_of_recipe = model, forward
        self.training = model.training

    def forward(self, batch: Any) -> Any:
        """Return the outputs for a batch."""
        return self._forward_of_recipe(self.model, batch)


def applied(model: nn.Module, recipe: Recipe) -> nn.Module:
    """Return what takes the recipe's inputs: the model, or the model by the recipe's `forward`."""
    return model if recipe.forward is None else Applied(model, recipe.forward)


def call(module: nn.Module, inputs: Any, model: nn.Module | None = None) -> Any:
    """Return a module's outputs; a dict of inputs becomes keyword arguments if `model` names them.

    `model` is the plain model where `module` is a compiled or wrapped one.
    """
    if isinstance(inputs, dict) and takes_keywords(model or module, inputs):
        return module(**inputs)
    return module(inputs)


_signatures: weakref.WeakKeyDictionary[nn.Module, inspect.Signature] = weakref.WeakKeyDictionary()


def takes_keywords(model: nn.Module, inputs: dict[Any, Any]) -> bool:
    """Whether a model's forward names what is in a dict of inputs."""
    if isinstance(model, Applied):
        return False
    if model not in _signatures:
        _signatures[model] = inspect.signature(model.forward)
    try:
        _signatures[model].bind(**inputs)
    except TypeError:
        return False
    return True


def terms_of(recipe: Recipe) -> Terms | None:
    """Return what counts the terms of the recipe's loss; None where they are the samples."""
    count = recipe.loss_terms
    if count is None:
        return None
    whole = recipe.forward is not None

    def terms(inputs: Any, targets: Any) -> Any:
        try:
            found = count(inputs if whole else (inputs, targets))
        except Exception as error:
            blame("The recipe's loss_terms failed", error, count)
        return check_terms(found, count)

    return terms


def check_terms(found: Any, count: object) -> Any:
    """Check that a number of terms is one, and return it.

    A tensor on a device is not read: the host would wait for it. If it is wrong, the loss shows it.
    """
    if isinstance(found, Tensor) and found.numel() == 1 and found.device.type != "cpu":
        return found.detach().reshape(())
    try:
        number = float(found)
    except (TypeError, ValueError, RuntimeError):
        number = float("nan")
    if not 0 < number < float("inf"):
        shown = found if isinstance(found, int | float) else describe_terms(found)
        raise UserError(
            f"The recipe's loss_terms{defined_at(count)} returned {shown} for a batch; it must be "
            "the number of what the loss is a mean over, greater than 0. Leave samples without any "
            "term out of the data."
        )
    return number


def describe_terms(found: Any) -> str:
    """Describe, for a message, what was returned instead of a number."""
    if isinstance(found, Tensor):
        return str(found.item()) if found.numel() == 1 else f"a tensor {tuple(found.shape)}"
    return f"a {type(found).__name__}"


def as_scalar(terms: Any, like: Tensor) -> Tensor:
    """Return a number of terms as a scalar beside `like`, without waiting for the device."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    if isinstance(terms, Tensor):
        return terms.to(dtype)
    return torch.full((), float(terms), dtype=dtype, device=like.device)
