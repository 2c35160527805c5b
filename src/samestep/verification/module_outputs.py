"""Find the module of a model that is the first to turn equal inputs into other outputs."""

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
    try:
        passes = []
        for each in inputs:
            restore()
            passes.append(module_calls(tested, model, each, rows))
        one, other = passes
        return first_at_fault(one, other, tested.rounding, type(model).__name__)
    except Exception:  # a module that does not run each time, or a batch size that fails
        return None


def first_at_fault(
    one: Sequence[ModuleCall], other: Sequence[ModuleCall], rounding: float, model: str
) -> ModuleDifference | None:
    """Return the first module that made another output of equal inputs; None if the last did not.

    A module whose inputs differ already only passes on what a module around it has made.

    Raises:
        ValueError: the two have different numbers of calls.
    """
    pairs = list(zip(one, other, strict=True))
    if not pairs or _apart(pairs[-1][0].outputs, pairs[-1][1].outputs) <= rounding:
        return None
    given_else = ""
    for mine, others in pairs:
        if _apart(mine.inputs, others.inputs) > rounding:
            given_else = given_else or mine.name
            continue
        difference = _apart(mine.outputs, others.outputs)
        if difference > rounding:
            inside = not mine.name or given_else.startswith(f"{mine.name}.")
            before = given_else if inside else ""
            return ModuleDifference(mine.name or model, difference, before)
    return None


def module_calls(
    tested: RecipeUnderTest, model: nn.Module, inputs: Any, rows: int | None = None
) -> list[ModuleCall]:
    """Return the calls of all modules in the order in which they returned, the model's last.

    With `rows`, only the first rows of each tensor are kept.
    """
    found: list[ModuleCall] = []
    given: list[list[Tensor]] = []

    def begin(_module: nn.Module, arguments: Any, keywords: Any) -> None:
        leaves = _tensors((arguments, keywords))
        given.append([leaf[:rows] if leaf.dim() else leaf for leaf in leaves])

    def end(name: str, output: Any) -> None:
        leaves = _tensors(output)
        if rows is not None:
            leaves = [leaf[:rows] for leaf in leaves if leaf.dim() and len(leaf) >= rows]
        found.append(ModuleCall(name, given.pop(), leaves))

    hooks = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(begin, with_kwargs=True))
        hooks.append(
            module.register_forward_hook(lambda _m, _i, output, name=name: end(name, output))
        )
    try:
        with torch.no_grad():
            tested.forward(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _tensors(tree: Any) -> list[Tensor]:
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return [leaf.detach().clone() for leaf in leaves]


def _apart(mine: list[Tensor], others: list[Tensor]) -> float:
    if len(mine) != len(others):  # one of them is given a state, say
        return math.inf
    pairs = [(a, b) for a, b in zip(mine, others, strict=True) if a.shape == b.shape]
    return max((largest_apart(a, b) for a, b in pairs), default=0.0)
