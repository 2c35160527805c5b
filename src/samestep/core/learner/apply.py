"""How a recipe's batch reaches its model, what its loss is the sum of and a mean over."""

import functools
import inspect
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from samestep.base.errors import UserError, blame, defined_at, did_you_mean
from samestep.base.trees import describe, num_rows, tree_leaves
from samestep.core.recipe import Recipe
from samestep.core.recipe_checks import moment_asks

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
        """Return the carried state of samples that have no predecessors."""
        from samestep.core.learner.carried import new_state  # noqa: PLC0415

        assert self._carry is not None
        rows = rows or num_rows(batch)
        if rows is None:
            raise UserError(
                f"Recipe(carry=…) needs a row for each sample in every tensor of a batch; it holds "
                f"{describe(batch)}."
            )
        like = next(self.model.parameters())
        return new_state(self._carry, rows, like.device, like.dtype)

    def _with(self, batch: Any, carried: Any) -> tuple[Any, Any]:
        returned = self._forward_of_recipe(self.model, batch, carried)
        if not (isinstance(returned, tuple) and len(returned) == 2):
            raise UserError(
                f"The recipe's forward{defined_at(self._forward_of_recipe)} returned "
                f"{describe(returned)}; with carry=… it must return (outputs, carried)."
            )
        return returned


def applied(
    model: nn.Module, recipe: Recipe, moment: "Moment | None" = None, *, compiles: bool = False
) -> nn.Module:
    """Return the module that takes the recipe's inputs: the model, or its call by `forward`."""
    if recipe.forward is None:
        return model
    forward = timed(recipe.forward, moment or Moment())
    if compiles and forward is not recipe.forward:  # it would be compiled anew for each step
        disable: Any = torch.compiler.disable
        forward = disable(forward, recursive=False)
    return Applied(model, forward, recipe.carry)


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


@dataclass
class Moment:
    """The training step that is taken, or the newest one, for what names it; counted from 0."""

    step: int = 0
    epoch: int = 0

    def after(self, position: Mapping[str, Any]) -> None:
        """Take the newest step of a training that stands at a position, as a checkpoint has it."""
        self.step = max(0, position["step"] - 1)
        self.epoch = max(0, position["epoch"] - (not position["step_in_epoch"]))


def timed(function: Callable[..., Any], moment: Moment) -> Callable[..., Any]:
    """Return a loss or forward that gets what it asks for of a moment, if not from its caller."""
    asks = moment_asks(function)
    if not asks:
        return function

    @functools.wraps(function)
    def at_moment(*args: Any, **named: int) -> Any:
        return function(*args, **{name: getattr(moment, name) for name in asks} | named)

    return at_moment


def summed(
    loss: Callable[[Any, Any], Any],
    weights: Mapping[str, float] | None,
    names: Collection[str] = (),
    *,
    some: bool = False,
) -> Callable[[Any, Any], Tensor]:
    """Return a loss that gives a scalar: of a dict of losses their weighted sum.

    That scalar has each loss by its name, unweighted and detached, in its attribute `parts`. With
    `names` each batch must have these losses. With `some`, others than these may have weights.
    """
    weights = weights or {}

    @functools.wraps(loss)  # with its arguments' names
    def total(outputs: Any, targets: Any, **moment: int) -> Any:
        value = loss(outputs, targets, **moment)
        summed_already = isinstance(value, Tensor) and parts_of(value).keys() == {*names}
        if summed_already or not (names or isinstance(value, Mapping)):
            return value
        of_these = {n: w for n, w in weights.items() if not some or n in value}
        return total_of(value, of_these, names or value, loss)

    return total


def evaluating(
    recipe: Recipe,
    loss: Callable[..., Any],
    moment: "Moment | None" = None,
    names: Collection[str] = (),
) -> Callable[[Any, Any], Tensor]:
    """Return the loss that evaluations call: the recipe's `evaluated_loss`, on the device."""
    timely, some = timed(loss, moment or Moment()), recipe.evaluation_loss is not None
    return summed(timely, recipe.loss_weights, names, some=some)


def total_of(
    parts: Any, weights: Mapping[str, float], names: Collection[str], loss: object
) -> Tensor:
    """Return the weighted sum of the losses that a recipe's loss returned by name."""
    if not isinstance(parts, Mapping) or parts.keys() != {*names} or not parts:
        named = ", ".join(map(str, parts)) if isinstance(parts, Mapping) else describe(parts)
        raise UserError(
            f"The recipe's loss{defined_at(loss)} returned {named or 'an empty dict'} for a batch; "
            f"it must return the same losses in every batch: {', '.join(names) or 'at least one'}. "
            "A loss that a batch does not have is a zero."
        )
    for name, part in parts.items():
        if not (isinstance(part, Tensor) and part.dim() == 0 and part.is_floating_point()):
            raise UserError(
                f"The recipe's loss{defined_at(loss)} returned {describe(part)} as its {name!r}; "
                "each of its losses must be a scalar tensor."
            )
    if unknown := [name for name in weights if name not in parts]:
        raise UserError(
            f"Recipe(loss_weights=…) names {unknown[0]!r}, which is none of the losses that loss()"
            f"{defined_at(loss)} returns. {did_you_mean(unknown[0], names)}They are: "
            f"{', '.join(names)}."
        )
    # In one order, so that the bits do not depend on the dict's.
    scaled = [parts[n] * weights[n] if weights.get(n, 1) != 1 else parts[n] for n in names]
    total: Any = sum(scaled[1:], start=scaled[0])
    total.parts = {name: parts[name].detach() for name in names}
    return total  # type: ignore[no-any-return]


def parts_of(loss: Any) -> dict[str, Tensor]:
    """Return the losses by name that a loss is the sum of, if it is."""
    return getattr(loss, "parts", {}) if isinstance(loss, Tensor) else {}


def with_parts(loss: Tensor) -> Tensor:
    """Return a loss and what it is the sum of as one vector, detached."""
    return torch.stack([loss.detach(), *(p.to(loss.dtype) for p in parts_of(loss).values())])


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A recipe's `evaluate_batch`, with its model."""

    function: Callable[[nn.Module, Any], Any]
    model: nn.Module
    whole: bool
    """Whether it is given a batch as it is, not as inputs and targets."""
    names: tuple[str, ...] = ()
    """What it returns, where that is known."""

    def __call__(self, inputs: Any, targets: Any, count: int) -> dict[str, Tensor]:
        """Return the values of a batch by name: (samples,)."""
        batch = inputs if self.whole else (inputs, targets)
        try:
            result = self.function(self.model, batch)
        except Exception as error:
            message = f"The recipe's evaluate_batch failed with a batch {describe(batch)}"
            blame(message, error, self.function)
        where = f"The recipe's evaluate_batch{defined_at(self.function)} returned"
        if not isinstance(result, Mapping):
            raise UserError(
                f"{where} {describe(result)}; it must be a dict of names, each with one value a "
                "sample."
            )
        if self.names and result.keys() != {*self.names}:
            raise UserError(
                f"{where} {', '.join(map(str, result)) or 'no names'} for a batch, and "
                f"{', '.join(self.names)} for another. Return the same names in every batch."
            )
        values = {n: _as_values(result[n]) for n in self.names or result}
        for name, value in values.items():
            if not isinstance(value, Tensor) or value.shape != (count,):
                raise UserError(
                    f"{where} {describe(result[name])} as {name!r} for {count} samples; it must be "
                    f"one value a sample, ({count},): sums and counts are reduced here."
                )
        return values


def _as_values(value: Any) -> Any:
    if isinstance(value, list) and all(isinstance(number, int | float) for number in value):
        return torch.tensor(value, dtype=torch.float64)
    return value


def measure_of(recipe: Recipe, model: nn.Module, names: Collection[str] = ()) -> Measure | None:
    """Return the recipe's `evaluate_batch` with this model, if it has one."""
    function, whole = recipe.evaluate_batch, recipe.forward is not None
    if function is None:
        return None
    return Measure(function=function, model=model, whole=whole, names=tuple(names))


def terms_of(recipe: Recipe) -> Terms | None:
    """Return the function that counts a loss's terms; None if each sample is one term."""
    count = recipe.loss_terms
    if count is None:
        return None
    whole = recipe.forward is not None

    @functools.wraps(count)  # with its place
    def terms(inputs: Any, targets: Any) -> Any:
        try:
            counted = count(inputs if whole else (inputs, targets))
        except Exception as error:
            blame("The recipe's loss_terms failed", error, count)
        return check_terms(counted, count)

    return terms


def check_terms(counted: Any, count: object) -> Any:
    """Check that a number of terms is one, and return it.

    A share of the global batch may have none. A tensor on a device is not read: the host would wait
    for it. If it is wrong, the sum over the ranks shows it.
    """
    if isinstance(counted, Tensor) and counted.numel() == 1 and counted.device.type != "cpu":
        return counted.detach().reshape(())
    try:
        number = float(counted)
    except (TypeError, ValueError, RuntimeError):
        number = float("nan")
    if not 0 <= number < float("inf"):
        shown = counted if isinstance(counted, int | float) else describe_terms(counted)
        raise UserError(
            f"The recipe's loss_terms{defined_at(count)} returned {shown} for a batch; it must be "
            "the number of what the loss is a mean over, 0 where these samples have none."
        )
    return number


def of_counted(loss: Tensor, outputs: Any, terms: Tensor) -> Tensor:
    """Return a loss over some terms as it is, and over none as 0 without a gradient.

    A mean over nothing is NaN, and so may be the gradients of the outputs that it was made of.
    """
    some = terms > 0
    if some.device.type == "cpu" and some:
        return loss
    for leaf in tree_leaves(outputs):
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
            hook: Any = leaf.register_hook
            hook(lambda gradient: torch.where(some, gradient, 0.0))
    counted: Any = torch.where(some, loss, 0.0)
    if parts := parts_of(loss):
        counted.parts = {name: torch.where(some, part, 0.0) for name, part in parts.items()}
    return counted  # type: ignore[no-any-return]


def over_nothing(terms: float, what: str, counts: object) -> str:
    """Return what to tell where a whole batch, `what`, has no terms."""
    return (
        f"The recipe's loss_terms{defined_at(counts)} counted {terms:g} in {what}, and a mean over "
        "nothing has no value. Leave samples without any term out of the data, or take larger "
        "batches."
    )


def describe_terms(counted: Any) -> str:
    """Describe, for a message, what was returned instead of a number."""
    if isinstance(counted, Tensor):
        return str(counted.item()) if counted.numel() == 1 else f"a tensor {tuple(counted.shape)}"
    return f"a {type(counted).__name__}"


def as_scalar(terms: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a number of terms as a scalar tensor, without waiting for the device."""
    if isinstance(terms, Tensor):
        return terms.to(dtype)
    return torch.full((), float(terms), dtype=dtype, device=device)
