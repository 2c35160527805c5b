"""`samestep.gather`: the rows of all ranks, for a loss that compares the samples of a batch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from samestep.base.errors import UserError
from samestep.base.trees import describe
from samestep.core.learner.gathered import gather_rows
from samestep.launch.ranks import process_group
from samestep.launch.ranks.world import World

_open: list[Callable[[], tuple[World, bool]]] = []
"""Of the open run: → its ranks, and whether this rank has a share; it raises outside of a batch."""


def open_gather(where: Callable[[], tuple[World, bool]]) -> None:
    """Let `gather` work on the ranks of a run, where `where` says so."""
    _open.append(where)


def close_gather() -> None:
    """End what `open_gather` began."""
    _open.clear()


class _Gather(torch.autograd.Function):
    """All-gather of rows; backward adds up what all ranks' losses say of this rank's rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, world: World, rows: int) -> Tensor:
        (gathered,), first = gather_rows([x[:rows]], rows, world, "samestep.gather: the tensors")
        ctx.world, ctx.first, ctx.rows, ctx.shape = world, first, rows, x.shape
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        total = ctx.world.reduce(gradients[0].contiguous())
        mine = total.new_zeros(ctx.shape)
        mine[: ctx.rows] = total[ctx.first : ctx.first + ctx.rows]
        return mine, None, None


def gather(x: Tensor) -> Tensor:
    """Return the rows of all ranks in the order of the global batch, and let gradients through.

        loss = contrast(samestep.gather(image_vectors), samestep.gather(text_vectors))
        run.backward(loss, model)

    Every rank makes the loss of the whole batch from it; `run.backward` then has the gradient that
    one process would have. A recipe says `Recipe(loss_over="batch")` instead, which also holds for
    micro-steps. Ranks may have unequally many rows. On one rank it is the input.

    Args:
        x: (rows of this rank, …), a row for each of its samples.

    Returns:
        (rows of all ranks, …), of the same type.

    Raises:
        UserError: it is called outside of a batch of the training, or rows on another rank are of
            another shape or type.
    """
    if not isinstance(x, Tensor) or x.dim() == 0:
        raise UserError(
            f"samestep.gather takes a tensor with one row per sample, not {describe(x)}."
        )
    if _open:
        world, has_share = _open[-1]()
    else:
        world = process_group.current_world()
        has_share = True
        if world is process_group.ALONE:
            raise UserError(
                "samestep.gather was called outside of a training. Call it in the loop over "
                "run.batches of samestep.open_run, or after samestep.dist.setup_distributed(); "
                'in a recipe, use Recipe(loss_over="batch") instead.'
            )
    if not world.connected:
        return x
    gathered: Tensor = _Gather.apply(x, world, len(x) if has_share else 0)  # type: ignore[no-untyped-call]
    return gathered
