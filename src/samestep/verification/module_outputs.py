"""Find the module of a model that is the first to turn equal inputs into other outputs."""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from samestep.data.trees import tree_leaves
from samestep.verification.difference import largest_apart
from samestep.verification.recipe_under_test import RecipeUnderTest


class ModuleDifference(NamedTuple):
    """Where two forward passes differ first."""

    module: str
    difference: float
    """Relative to the largest output."""
    before: str = ""
    """The first module within it whose inputs differ: the difference is made before that one."""

    @property
    def place(self) -> str:
        """The module in words."""
        return f"{self.module}, before it calls {self.before}," if self.before else self.module


class ModuleCall(NamedTuple):
    """The inputs and outputs of a module in a forward pass."""

    name: str
    """Empty for the model itself."""
    inputs: list[Tensor]
    outputs: list[Tensor]


def first_difference(
    tested: RecipeUnderTest,
    model: nn.Module,
    *inputs: Any,
    rows: int | None = None,
    restore: Callable[[], object] = lambda: None,
) -> ModuleDifference | None:
    """Return the first module with another output, if the model's own output differs at all.

    The first few rows of two inputs are compared, or all; `restore` is called before each pass.
    """
    passes = []
    with contextlib.suppress(Exception):  # modules that do not run each time, or fail on a size
        for each in inputs:
            restore()
            passes.append(module_calls(tested, model, each, rows))
        one, other = passes
        return first_at_fault(one, other, tested.rounding, type(model).__name__)
    return None


def first_at_fault(
    one: Sequence[ModuleCall], other: Sequence[ModuleCall], rounding: float, model: str
) -> ModuleDifference | None:
    """Return the first module that made another output of equal inputs; None if the last did not.

    A module whose inputs differ already only passes on what a module around it has made.
    """
    pairs = list(zip(one, other, strict=True))
    if not pairs or _apart(pairs[-1][0].outputs, pairs[-1][1].outputs) <= rounding:
        return None
    given_else = ""
    for mine, others in pairs:
        if _apart(mine.inputs, others.inputs) > rounding:
            given_else = given_else or mine.name
        elif (difference := _apart(mine.outputs, others.outputs)) > rounding:
            inside = not mine.name or given_else.startswith(f"{mine.name}.")
            return ModuleDifference(mine.name or model, difference, given_else * inside)
    return None


def module_calls(
    tested: RecipeUnderTest, model: nn.Module, inputs: Any, rows: int | None = None
) -> list[ModuleCall]:
    """Return the calls of all modules in the order in which they returned, the model's last.

    With `rows`, only the first rows of each tensor are kept.
    """
    found: list[ModuleCall] = []
    given: list[list[Tensor]] = []

    def begin(_module: nn.Module, *arguments: Any) -> None:
        given.append([leaf[:rows] if leaf.dim() else leaf for leaf in _tensors(arguments)])

    def end(name: str, output: Any) -> None:
        leaves = _tensors(output)
        if rows is not None:
            leaves = [leaf[:rows] for leaf in leaves if leaf.dim() and len(leaf) >= rows]
        found.append(ModuleCall(name, given.pop(), leaves))

    with contextlib.ExitStack() as hooks, torch.no_grad():
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(begin, with_kwargs=True))
            after = module.register_forward_hook(lambda _m, _i, out, name=name: end(name, out))
            hooks.enter_context(after)
        tested.forward(model, inputs)
    return found


def _tensors(tree: Any) -> list[Tensor]:
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return [leaf.detach().clone() for leaf in leaves]


def _apart(mine: list[Tensor], others: list[Tensor]) -> float:
    if len(mine) != len(others):  # one of them is given a state, say
        return math.inf
    pairs = [(a, b) for a, b in zip(mine, others, strict=True) if a.shape == b.shape]
    return max((largest_apart(a, b) for a, b in pairs), default=0.0)
