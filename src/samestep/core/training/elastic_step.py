"""Steps of ranks that outlive each other: each rank knows what a step yields, or takes it back."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from samestep.core.data.order import Block
from samestep.core.learner.side_effects import keep_buffers
from samestep.core.training.step import EagerStep


@contextlib.contextmanager
def unchanged_if_failed(model: nn.Module) -> Iterator[None]:
    """Give a model its buffers back where a step fails half-way, as where another rank dies.

    The weights need nothing: they change once all collectives are over.
    """
    put_back = keep_buffers(model)
    try:
        yield
    except Exception:
        put_back()
        raise


class ElasticStep(EagerStep):
    """Steps of which every rank knows the loss: rank 0 may die before it has told it.

    It comes with the all-reduce of the gradients, if it can.
    """

    def _backward(self, block: Block) -> tuple[Tensor, Tensor | None]:
        if self._learner.counter is not None:
            self._learner.counter.grad = None
        return super()._backward(block)

    def _loss(self, part: Block, weight: Any) -> tuple[Tensor, Tensor]:
        loss, reported = super()._loss(part, weight)
        counter = self._learner.counter
        if counter is not None:
            # These numbers are its gradient. Behind them is room for a number of terms.
            numbers = reported.to(counter.dtype).view(-1)
            own = counter if counter.numel() == numbers.numel() else counter[: numbers.numel()]
            loss = loss + own.dot(numbers)
        return loss, reported

    def _of_ranks(self, total: Tensor) -> Tensor:
        counter = self._learner.counter
        if counter is None or self._learner.over_batch:
            return self._world.reduce(super()._of_ranks(total))
        assert counter.grad is not None
        return counter.grad[: total.numel()].clone().view(total.shape)
