"""A recipe's `batch_transform`: mixup, CutMix and what else mixes the samples of a batch.

Every rank is sent the whole global batch, changes it with the same random numbers, and trains on
its own rows of the result.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import call
from typing import Any

import torch
from torch import Tensor

from samestep.base.errors import UserError, blame, defined_at
from samestep.base.settings import Settings
from samestep.base.trees import describe, map_tensors, narrow, tree_leaves
from samestep.core.data.keyed_random import host_seeded, mix, seed_torch
from samestep.core.data.order import Block
from samestep.core.learner.device import data_dtype
from samestep.core.learner.gathered import gather_rows, joined, rebuilt, rows_of
from samestep.core.recipe import Recipe
from samestep.launch.ranks.world import World

_FIELD = "Recipe(batch_transform=…)"


class BatchTransform:
    """Changes the global batch of each step, equally on all ranks."""

    def __init__(self, recipe: Recipe, settings: Settings, world: World) -> None:
        assert recipe.batch_transform is not None
        self._function, self._whole = recipe.batch_transform, recipe.forward is not None
        self._seed, self._dtype = settings.seed, data_dtype(settings.precision)
        self._world = world
        self._agreed = False

    def __call__(self, block: Block, epoch: int, step: int) -> Block:
        """Return this rank's part of a step with its samples changed; all ranks call it.

        Epoch and step are counted from 0: with the seed, they decide what is drawn.
        """
        # A virtual rank's share is a micro-step, and a rank may have none.
        parts = block.parts if block.targets is None else (block,)
        on_every: Callable[[Callable[[], Any]], Any] = self._world.on_every
        agreed = call if self._agreed else on_every
        columns, rows = agreed(lambda: self._columns(parts))
        subject = f"{_FIELD}: what ranks have of the batch"
        tensors, first = gather_rows(columns, rows, self._world, subject)
        cut = agreed(lambda: self._cut(parts, tensors, first, epoch, step))
        self._agreed = True
        return cut[0] if block.targets is not None else replace(block, parts=tuple(cut))

    def _columns(self, parts: Sequence[Block]) -> tuple[list[Tensor], int]:
        """Return this rank's rows of each tensor of the batch, and their number."""
        real = [part for part in parts if part.weight]
        # A part without a weight stands in: it only tells the form of a row.
        own = [self._leaves(part) for part in real or parts[:1]]
        columns = [joined(column, _FIELD).contiguous() for column in zip(*own, strict=True)]
        rows = sum(part.rows for part in real)
        return (columns if real else [column[:0] for column in columns]), rows

    def _leaves(self, part: Block) -> list[Tensor]:
        trees = [part.inputs] if self._whole else [part.inputs, part.targets]
        return [leaf for tree in trees for leaf in rows_of(tree, part.rows, "batch", _FIELD)]

    def _cut(
        self, parts: Sequence[Block], tensors: Sequence[Tensor], first: int, epoch: int, step: int
    ) -> list[Block]:
        """Change the whole batch, and return these parts of it, whose first row is `first`."""
        if not parts:
            return []
        size = len(tensors[0])
        tensors_left = iter(tensors)
        cut = []
        inputs = rebuilt(parts[0].inputs, tensors_left)
        targets = inputs if self._whole else rebuilt(parts[0].targets, tensors_left)
        inputs, targets = self.change(inputs, targets, size, epoch, step)
        for part in parts:
            start = first if part.weight else 0
            first += part.rows if part.weight else 0
            mine = _rows(inputs, start, part.rows, size)
            wanted = mine if self._whole else _rows(targets, start, part.rows, size)
            cut.append(replace(part, inputs=mine, targets=wanted))
        return cut

    def change(
        self, inputs: Any, targets: Any, size: int, epoch: int = 0, step: int = 0
    ) -> tuple[Any, Any]:
        """Return the inputs and targets that the recipe makes of a whole batch of `size` samples.

        With `forward`, both are the batch.
        """
        arguments = (inputs,) if self._whole else (inputs, targets)
        # Six parts: nothing else that is drawn is seeded alike.
        drawn, device = mix(self._seed, 2, epoch, step, 0, 0), self._world.device
        with host_seeded(drawn):
            if device.type != "cpu":  # each forward seeds it anew
                seed_torch(drawn, device)
            try:
                changed = self._function(*arguments)
            except Exception as error:
                message = f"The recipe's batch_transform failed with a batch {describe(arguments)}"
                blame(message, error, self._function)
        pair = isinstance(changed, tuple | list) and len(changed) == 2
        leaves = tree_leaves(changed)
        fit = [isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == size for leaf in leaves]
        if not all(fit) or not (pair or self._whole):
            wanted = "the batch" if self._whole else "a pair (inputs, targets)"
            raise UserError(
                f"The recipe's batch_transform{defined_at(self._function)} returned "
                f"{describe(changed)} for {size} samples; it must return {wanted}, of tensors with "
                "a row for each sample."
            )
        changed = map_tensors(self._cast, changed)
        return (changed, changed) if self._whole else (changed[0], changed[1])

    def _cast(self, leaf: Tensor) -> Tensor:
        return leaf.to(self._dtype) if leaf.is_floating_point() else leaf


def _rows(tree: Any, start: int, count: int, size: int) -> Any:
    """Return some rows in memory of their own: a kernel may round otherwise elsewhere."""
    return tree if count == size else map_tensors(torch.clone, narrow(tree, start, count))
