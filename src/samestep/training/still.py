"""What a forward of virtual ranks must not write: each rank computes another number of them."""

import torch
from torch import Tensor, nn

from samestep.errors import UserError
from samestep.training.step import Trainee


class Still:
    """The parameters of a model, and what its loss holds: a step's forwards leave them alone.

    Args:
        trainee: the model and its loss.
    """

    def __init__(self, trainee: Trainee) -> None:
        self._named: dict[str, Tensor] = {
            f"the model's parameter {name}": p for name, p in trainee.model.named_parameters()
        }
        loss = trainee.loss
        if isinstance(loss, nn.Module):
            self._named |= {f"the loss's buffer {name}": b for name, b in loss.named_buffers()}
            self._named |= {f"the loss's parameter {n}": p for n, p in loss.named_parameters()}
        self._tensors = list(self._named.values())
        self._first = True
        self._marks: list[tuple[int, int]] = []
        self._kept: list[Tensor] = []

    def begin(self) -> None:
        """Keep what they are before a step."""
        self._marks = self._mark()
        if self._first:  # what is written by way of `.data` leaves no mark
            self._kept = [tensor.detach().clone() for tensor in self._tensors]

    def check(self) -> None:
        """Check, after a virtual rank, that they are what they were.

        Raises:
            UserError: one is not.
        """
        marks = self._mark()
        if marks == self._marks and not self._first:
            return
        wrote = [now != before for now, before in zip(marks, self._marks, strict=True)]
        if self._first:
            tensors = zip(self._tensors, self._kept, strict=True)
            wrote = [w or not torch.equal(t, k) for w, (t, k) in zip(wrote, tensors, strict=True)]
            self._first, self._kept = False, []
        if any(wrote):
            what = list(self._named)[wrote.index(True)]
            raise UserError(
                f"--virtual-ranks: forward writes {what}, once for each virtual rank that a rank "
                "computes, so it would depend on the number of ranks. Keep what forward writes in "
                "a buffer of the model, or leave --virtual-ranks out."
            )

    def _mark(self) -> list[tuple[int, int]]:
        return [(t._version, t.data_ptr()) for t in self._tensors]  # noqa: SLF001
