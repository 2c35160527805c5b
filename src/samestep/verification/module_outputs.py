"""Find the first module of a model whose output differs between two forward passes."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from samestep.data.trees import tree_leaves
from samestep.verification.recipe_under_test import RecipeUnderTest


class ModuleDifference(NamedTuple):
    """Where two forward passes differ first."""

    module: str
    difference: float
    """Relative to the largest output."""


def first_difference(
    tested: RecipeUnderTest,
    model: nn.Module,
    *inputs: Any,
    rows: int | None = None,
    state: Mapping[str, Tensor] | None = None,
) -> ModuleDifference | None:
    """Return the first module with another output, if the model's own output differs at all.

    Two inputs' first few rows are compared, or all; the model may begin both times with a state.
    """
    try:
        passes = []
        for each in inputs:
            if state is not None:
                model.load_state_dict(state)
            passes.append(_outputs_of_modules(tested, model, each, rows))
        pairs = list(zip(*passes, strict=True))
    except Exception:  # a module that does not run each time, or a batch size that fails
        return None
    found = [(name, _apart(mine, others)) for (name, mine), (_, others) in pairs]
    if not found or found[-1][1] <= tested.rounding:
        return None
    name, difference = next(pair for pair in found if pair[1] > tested.rounding)
    return ModuleDifference(name or type(model).__name__, difference)


def _outputs_of_modules(
    tested: RecipeUnderTest, model: nn.Module, inputs: Any, rows: int | None
) -> list[tuple[str, list[Tensor]]]:
    """Return each module's name and outputs in the order in which they returned, the model last."""
    found: list[tuple[str, list[Tensor]]] = []

    def kept(output: Any) -> list[Tensor]:
        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if rows is not None:
            leaves = [leaf[:rows] for leaf in leaves if leaf.dim() and len(leaf) >= rows]
        return [leaf.detach().clone() for leaf in leaves]

    hooks = [
        module.register_forward_hook(
            lambda _module, _inputs, output, name=name: found.append((name, kept(output)))
        )
        for name, module in model.named_modules()
    ]
    try:
        with torch.no_grad():
            tested.forward(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _apart(mine: list[Tensor], others: list[Tensor]) -> float:
    found = 0.0
    for a, b in zip(mine, others, strict=False):
        if a.shape == b.shape and a.is_floating_point() and a.numel():
            a, b = a.double(), b.double()  # noqa: PLW2901
            found = max(found, float((a - b).abs().max() / a.abs().max().clamp(min=1e-12)))
    return found
