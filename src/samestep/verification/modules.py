"""Which module of a model does it: gives a sample something of the others, or remembers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from samestep.data.blocks import Block
from samestep.data.trees import narrow, tree_leaves
from samestep.verification.subject import Subject, held_model


def mixing(subject: Subject, model: nn.Module, block: Block) -> tuple[str, float] | None:
    """Return the first module that gives a sample something of the others, all draws held still."""
    rows = block.rows // 2
    if rows < 1:
        return None
    part = narrow(block.inputs, 0, rows)

    def kept(tree: Any) -> list[Tensor]:
        return [leaf[:rows] for leaf in _leaves(tree) if leaf.dim() and len(leaf) >= rows]

    return _first_difference(
        model,
        subject,
        lambda: _outputs(subject, model, block.inputs, kept),
        lambda: _outputs(subject, model, part, kept),
    )


def remembering(subject: Subject, block: Block) -> tuple[str, float] | None:
    """Return the first module whose output changes though weights, buffers and inputs do not."""
    model = held_model(subject, block)
    state = {name: value.clone() for name, value in model.state_dict().items()}

    def run() -> list[tuple[str, list[Tensor]]]:
        model.load_state_dict(state)
        return _outputs(subject, model, block.inputs, _leaves)

    return _first_difference(model, subject, run, run)


Run = Callable[[], list[tuple[str, list[Tensor]]]]


def _first_difference(
    model: nn.Module, subject: Subject, one: Run, other: Run
) -> tuple[str, float] | None:
    """Return the first of two runs' modules that gave something else, if the model did at all."""
    try:
        pairs = list(zip(one(), other(), strict=True))
    except Exception:  # modules that run or not, or a size that fails
        return None
    if not pairs or _difference(pairs[-1][0][1], pairs[-1][1][1]) <= subject.rounding:
        return None
    for (name, mine), (_, others) in pairs:
        found = _difference(mine, others)
        if found > subject.rounding:
            return name or type(model).__name__, found
    return None


def _outputs(
    subject: Subject, model: nn.Module, inputs: Any, kept: Callable[[Any], list[Tensor]]
) -> list[tuple[str, list[Tensor]]]:
    """Return what each module gave, in the order in which they ended; the model is the last."""
    found: list[tuple[str, list[Tensor]]] = []
    hooks = [
        module.register_forward_hook(
            lambda _module, _inputs, output, name=name: found.append(
                (name, [leaf.detach().clone() for leaf in kept(output)])
            )
        )
        for name, module in model.named_modules()
    ]
    try:
        with torch.no_grad():
            subject.forward(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _difference(mine: list[Tensor], others: list[Tensor]) -> float:
    pairs = [
        (a.double(), b.double())
        for a, b in zip(mine, others, strict=False)
        if a.shape == b.shape and a.is_floating_point() and a.numel()
    ]
    return max((float((a - b).abs().max() / _scale(a)) for a, b in pairs), default=0.0)


def _scale(tensor: Tensor) -> float:
    return max(float(tensor.abs().max()), 1e-12)


def _leaves(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]
