"""A loss made over the whole global batch: every rank sees the outputs of all of them.

Outputs and targets of all ranks and micro-steps are gathered, the loss goes back to the outputs,
and each micro-step continues from there into the model: the gradient caching of Gao et al. (2021),
"Scaling deep contrastive learning batch size under memory limited setup" (arXiv:2101.06983).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samestep.base.errors import UserError, listed
from samestep.base.trees import describe, map_leaves, tree_leaves
from samestep.core.data.blocks import Block
from samestep.core.training.apply import parts_of, with_parts
from samestep.core.training.gathered import gather_rows
from samestep.launch.ranks.world import World


@dataclass(frozen=True)
class OutputGradient:
    """What the loss over the whole batch says of a micro-step's outputs."""

    leaves: Sequence[Tensor | None]
    """The gradient of each leaf of the outputs; None where there is none."""
    loss: Tensor
    """The loss over the whole batch, for the first micro-step of all; 0 for the others. With
    losses by name (1 + names,)."""
    outputs: Any = None
    """The outputs, where they still have their graph."""

    def of(self, outputs: Any) -> Tensor:
        """Return a scalar whose gradient by the outputs is the kept one."""
        pairs = zip(tree_leaves(outputs), self.leaves, strict=True)
        parts = [(leaf * gradient).sum() for leaf, gradient in pairs if gradient is not None]
        total: Tensor = sum(parts[1:], start=parts[0])
        return total


class WholeBatch:
    """The outputs and targets of all micro-steps on all ranks; every rank makes it at once."""

    def __init__(
        self, parts: Sequence[Block], outputs: Sequence[Any], world: World, named: int = 0
    ) -> None:
        """Gather them; the loss will be the sum of `named` ones, if of any."""
        self._parts, self._outputs, self._world = parts, outputs, world
        self._no_loss = torch.zeros((1 + named,) if named else (), device=world.device)
        # A part without a weight only stands in, so that its rank takes part in collectives.
        real = [(part, made) for part, made in zip(parts, outputs, strict=True) if part.weight]
        rows = sum(part.rows for part, _ in real)
        own_outputs = [rows_of(made, part.rows, "outputs") for part, made in real]
        own_targets = [rows_of(part.targets, part.rows, "targets") for part, _ in real]
        both = [[*o, *t] for o, t in zip(own_outputs, own_targets, strict=True)]
        own = [joined(column) for column in zip(*both, strict=True)]
        tensors, self._first = gather_rows(own, rows, world, "Outputs and targets of the batch")
        self._real = real
        number = len(own_outputs[0]) if real else 0
        self._made = [t.requires_grad_() if t.is_floating_point() else t for t in tensors[:number]]
        self._targets = tensors[number:]

    def backward(
        self,
        loss_of: Callable[[Any, Any], Tensor],
        scale: Callable[[Tensor], Tensor],
        named: Mapping[str, Tensor],
    ) -> list[OutputGradient]:
        """Compute the loss and go back to the outputs; return what is due to each micro-step.

        `scale` is what a gradient scaler makes of the loss. It is checked that the loss does not
        read the `named` weights.
        """
        if not self._real:
            return [self._nothing(made) for made in self._outputs]
        part, made = self._real[0]
        outputs = rebuilt(made, iter(self._made))
        loss = loss_of(outputs, rebuilt(part.targets, iter(self._targets)))
        leaves = [leaf for leaf in self._made if leaf.requires_grad]
        if named:
            _refuse_weights(loss, named)
        found = iter(torch.autograd.grad(scale(loss), leaves, allow_unused=True))
        gradients = [next(found) if leaf.requires_grad else None for leaf in self._made]
        due, row, told = [], self._first, with_parts(loss) if parts_of(loss) else loss.detach()
        for part, made in zip(self._parts, self._outputs, strict=True):
            if not part.weight:
                due.append(self._nothing(made))
                continue
            own = iter(gradients)
            cut = [self._cut(leaf, own, row, part.rows) for leaf in tree_leaves(made)]
            due.append(OutputGradient(cut, told if row == 0 else torch.zeros_like(told)))
            row += part.rows
        return due

    def _cut(self, leaf: Any, gradients: Iterator[Tensor | None], row: int, rows: int) -> Any:
        if not isinstance(leaf, Tensor):
            return None
        gradient = next(gradients)
        if gradient is None:
            return None
        if leaf.dim() == 0:  # one number for the whole batch: the first micro-step's counts
            return gradient.sum() if row == 0 else torch.zeros_like(leaf)
        # In memory of its own: a kernel may round otherwise where rows begin elsewhere.
        return gradient[row : row + rows].clone()

    def _nothing(self, made: Any) -> OutputGradient:
        floats = [isinstance(x, Tensor) and x.is_floating_point() for x in tree_leaves(made)]
        zeros = zip(tree_leaves(made), floats, strict=True)
        leaves = [torch.zeros_like(leaf) if is_float else None for leaf, is_float in zeros]
        return OutputGradient(leaves, self._no_loss)


def _refuse_weights(loss: Tensor, named: Mapping[str, Tensor]) -> None:
    """Refuse a loss that reads weights of the model itself: their gradient would be lost."""
    trained = {name: p for name, p in named.items() if p.requires_grad}
    found = torch.autograd.grad(loss, [*trained.values()], retain_graph=True, allow_unused=True)
    read = [name for name, g in zip(trained, found, strict=True) if g is not None]
    if read:
        raise UserError(
            f'Recipe(loss_over="batch"): the loss reads {listed(read)} of the model by itself, and '
            "its gradient goes back only through the outputs. Let the model return what the loss "
            "needs of it, with its outputs: one number for the batch, or a row for each sample."
        )


_FIELD = 'Recipe(loss_over="batch")'


def rows_of(tree: Any, rows: int, what: str, field: str = _FIELD) -> list[Tensor]:
    """Return the tensors of a tree, each with a row for each sample; a single number repeats.

    `what` it is, and the `field` that asks for it, are for messages.
    """
    found = []
    for leaf in tree_leaves(tree):
        if not isinstance(leaf, Tensor):
            if leaf is None or (what == "outputs" and isinstance(leaf, int | float)):
                continue
            raise UserError(
                f"{field}: the {what} hold {describe(leaf)}, and only tensors are "
                "put together from all ranks. Turn names into numbers, or leave them out of "
                "the batch."
            )
        if leaf.dim() and len(leaf) != rows:
            raise UserError(
                f"{field}: the {what} of {rows} samples hold {describe(leaf)}, which has "
                "no row for each sample, so the batch of all ranks cannot be put "
                "together. Give each sample a row (pad to a fixed length), or one number for all."
            )
        found.append(leaf.detach() if leaf.dim() else leaf.detach().repeat(rows))
    return found


def joined(column: Sequence[Tensor], field: str = _FIELD) -> Tensor:
    """Return the rows of several micro-steps in new memory."""
    shapes = {tuple(t.shape[1:]) for t in column}
    if len(shapes) > 1:
        one, other = sorted(shapes)[:2]
        raise UserError(
            f"{field}: the batch cannot be put together: rows are {one} in one micro-step and "
            f"{other} in another. Give rows of one shape: pad to a fixed length."
        )
    return torch.cat(list(column)) if len(column) > 1 else column[0].clone()


def put_together(trees: Sequence[Any], counts: Sequence[int]) -> Any:
    """Return the rows of several batches, of `counts` samples, as one batch of the same form."""
    rows = [rows_of(tree, count, "outputs") for tree, count in zip(trees, counts, strict=True)]
    return rebuilt(trees[0], iter([joined(column) for column in zip(*rows, strict=True)]))


def rebuilt(tree: Any, tensors: Iterator[Tensor]) -> Any:
    """Return a tree of the same form with the rows of the whole batch."""

    def of(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return next(tensors) if leaf.dim() else next(tensors)[0]

    return map_leaves(of, tree)
