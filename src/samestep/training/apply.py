"""How a recipe's batch reaches its model, and what its loss is a mean over."""

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from samestep.data.trees import describe, num_rows
from samestep.errors import UserError, blame, defined_at
from samestep.recipe import Recipe
from samestep.training.carried import made

Terms = Callable[[Any, Any], Any]
"""(inputs, targets) → the number of what a batch's loss is a mean over."""


class Applied(nn.Module):
    """A model that is called with a batch, by the recipe's own `forward`."""

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        carry: Callable[[int], Any] | None = None,
    ) -> None:
        super().__init__()
        self.model, self._forward_of_recipe, self._carry = model, forward, carry
        self.training = model.training

    @property
    def carries(self) -> bool:
        """Whether the recipe carries state from batch to batch."""
        return self._carry is not None

    def forward(self, batch: Any, carried: Any = None) -> Any:
        """Return the outputs for a batch; with carried state, (outputs, carried).

        Without it, where the recipe has some, the batch begins with new state.
        """
        if self._carry is None:
            return self._forward_of_recipe(self.model, batch)
        if carried is None:
            return self._with(batch, self.new_state(batch))[0]
        return self._with(batch, carried)

    def new_state(self, batch: Any, rows: int | None = None) -> Any:
        """Return what samples without any before them are given."""
        assert self._carry is not None
        rows = rows or num_rows(batch)
        if rows is None:
            raise UserError(
                f"Recipe(carry=…) needs a row for each sample in every tensor of a batch; it holds "
                f"{describe(batch)}."
            )
        like = next(self.model.parameters())
        return made(self._carry, rows, like.device, like.dtype)

    def _with(self, batch: Any, carried: Any) -> tuple[Any, Any]:
        found = self._forward_of_recipe(self.model, batch, carried)
        if not (isinstance(found, tuple) and len(found) == 2):
            raise UserError(
                f"The recipe's forward{defined_at(self._forward_of_recipe)} returned "
                f"{describe(found)}; with carry=… it must return (outputs, carried)."
            )
        return found


def applied(model: nn.Module, recipe: Recipe) -> nn.Module:
    """Return what takes the recipe's inputs: the model, or the model by the recipe's `forward`."""
    return model if recipe.forward is None else Applied(model, recipe.forward, recipe.carry)


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
