"""A loss that is a mean over terms, such as tokens, of which each rank has another number."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samestep.core.data.order import Block
from samestep.core.learner.apply import as_scalar, of_counted
from samestep.core.learner.device import data_dtype
from samestep.core.training.step import Objective
from samestep.launch.ranks.mesh import parts_of_rank


class _TermWeight(NamedTuple):
    weight: float | Tensor
    """What the loss of a micro-step is multiplied by."""
    terms: Tensor | None
    """Its terms, where ranks add them up."""


class TermMean(Objective):
    """The mean of a loss over the terms of the global batch.

    Ranks know the number of all terms only after the backward. Until then each term weighs 1 /
    global batch, and `mean` corrects loss and gradients.
    """

    def __init__(self, *others: Any) -> None:
        super().__init__(*others)
        self._parameters = [p for p in self._learner.model.parameters() if p.requires_grad]

    def weigh(self, parts: Sequence[Block]) -> Sequence[_TermWeight]:
        """Return the share of each micro-step; in the first step a mistake raises on all ranks."""
        if (counter := self._learner.counter) is not None:
            counter.grad = None
        if self.agreed:
            return self._shares(parts)
        return self._world.on_every(lambda: self._shares(parts))

    def _shares(self, parts: Sequence[Block]) -> Sequence[_TermWeight]:
        count, size = self._learner.terms, parts[0].global_size
        assert count is not None
        dtype, device = data_dtype(self._precision), self._world.device
        counts = [as_scalar(count(p.inputs, p.targets), dtype, device) * p.weight for p in parts]
        self.terms = total = torch.stack(counts).sum() if len(counts) > 1 else counts[0]
        if self._world.virtual_ranks:
            return [_TermWeight(terms / size, None) for terms in counts]
        if self._divisor > 1:
            return [_TermWeight(terms * (self._divisor / size), terms) for terms in counts]
        if len(parts) == 1:
            return [_TermWeight(1.0, None)]
        return [_TermWeight(terms / total, None) for terms in counts]

    def agree_without_samples(self) -> None:
        """Join the collectives in which other ranks count terms and compute their first loss."""
        self._world.on_every(lambda: None)
        super().agree_without_samples()

    def loss(self, part: Block, weight: _TermWeight) -> tuple[Tensor, Tensor]:
        """Return the scaled loss for a micro-step's backward, and the loss to add to the step's."""
        loss = self.compute(part)
        if isinstance(weight.weight, Tensor):
            loss = of_counted(loss, self.outputs, weight.weight)
        scaled, reported = self.weighted(loss, weight.weight)
        counter = self._learner.counter
        if counter is not None and weight.terms is not None:
            # The number is its gradient, and travels with those of the weights.
            own = counter if counter.numel() == 1 else counter[-1:]
            scaled = scaled + own.dot(weight.terms.view(1))
        return scaled, reported

    def mean(self, total: Tensor, global_size: int) -> tuple[Tensor, Tensor | None]:
        """Return the step's loss and the terms of all ranks, by which the gradients are divided."""
        assert self.terms is not None
        if self._world.world_size == 1:
            return total, self.terms
        counter = self._learner.counter
        if counter is None:
            terms = self._world.reduce(self.terms)
        else:
            assert counter.grad is not None
            terms = counter.grad.detach()[-1] * self._world.world_size
        factor = global_size / terms
        gradients = parts_of_rank(p.grad for p in self._parameters if p.grad is not None)
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))
        return total * factor, terms
