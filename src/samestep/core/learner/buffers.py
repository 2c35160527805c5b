"""A model's buffers within a step of virtual ranks, such as the statistics of BatchNorm.

Each virtual rank starts from the buffers before the step. A floating-point buffer then moves by the
mean of what all virtual ranks moved it by; any other takes the value that virtual rank 0 gave it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from samestep.base.errors import UserError
from samestep.core.learner.side_effects import BufferPlace, buffer_places


class StepBuffers:
    """What the virtual ranks of this rank do to a model's buffers, as a vector to add up.

    The first step finds out which buffers forward changes; later steps exchange only those.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._known = False
        self._all = buffer_places(model)
        self._watch(self._all)

    def _watch(self, places: Sequence[BufferPlace]) -> None:
        self._floats = [place for place in places if place.tensor.is_floating_point()]
        self._others = [place for place in places if not place.tensor.is_floating_point()]
        self._num_bytes = sum(place.tensor.nbytes for place in self._others)
        self._all = [*self._floats, *self._others, *(p for p in self._all if p not in {*places})]
        # Until it is known which buffers change, any may.
        self._marked = self._all[len(places) :] if self._known else self._all

    @property
    def size(self) -> int:
        """How many numbers `moved` returns in the coming step."""
        if not self._all:
            return 0
        flags = 0 if self._known else len(self._all)
        return flags + sum(place.tensor.numel() for place in self._floats) + self._num_bytes

    def begin(self) -> None:
        """Remember the buffers as they are before a step."""
        if not self._all:
            return
        floats, others = _tensors_at(self._floats), _tensors_at(self._others)
        self._before = self._flat(floats)
        self._kept = [*_cut(self._before, floats), *(tensor.clone() for tensor in others)]
        self._no_bytes = self._before.new_zeros(self._num_bytes)
        self._marks = _marks(self._marked)

    @torch.no_grad()
    def take_changes(self, part: int) -> list[Tensor]:
        """Undo a virtual rank's changes to the buffers, and return them.

        In the first step, whether each was changed; then how far the floating-point ones moved, and
        the bytes of the others, only from virtual rank 0.
        """
        floats, others = _tensors_at(self._floats), _tensors_at(self._others)
        pairs = zip(_marks(self._marked), self._marks, strict=True)
        changed = [now != before for now, before in pairs]
        after = self._flat(floats)
        changes = []
        if not self._known or after.shape != self._before.shape:
            both = [*zip((*floats, *others), self._kept, strict=True)]
            _refuse_first(
                self._all,
                [now.shape != before.shape for now, before in both],
                "changes its shape in forward, so what virtual ranks make of it cannot be added "
                "up. Keep its shape",
            )
            # Kernels of batch normalisation write without counting it as a change.
            wrote = [not torch.equal(now, before) for now, before in both]
            flags = [marked or written for marked, written in zip(changed, wrote, strict=True)]
            changes.append(torch.tensor(flags, dtype=self._dtype, device=self._before.device))
        changes.append(after - self._before)
        changes.append(self._no_bytes if part else self._bytes(others))
        if self._kept:
            torch._foreach_copy_([*floats, *others], self._kept)
        if self._known:
            _refuse_first(
                self._marked,
                changed,
                "changed in this step, but not in the first one, which decides what virtual ranks "
                "add up. Let each forward of a training step write it",
            )
        self._marks = _marks(self._marked)
        return changes

    @torch.no_grad()
    def settle(self, total: Tensor, present: int) -> None:
        """Set the buffers to the result of all virtual ranks that have samples."""
        changed: list[bool] = []
        if not self._known:
            changed = (total[: len(self._all)] > 0).tolist()
            total = total[len(self._all) :]
        sums, sent = total[: len(self._before)], total[len(self._before) :].to(torch.uint8)
        moved = sums / present
        # Infinities that stay, as in masks, have moved by NaN.
        stays = moved.isnan() & ~self._before.isfinite()
        after = torch.where(stays, self._before, self._before + moved)
        if floats := _tensors_at(self._floats):
            torch._foreach_copy_(floats, _cut(after, floats))
        others = _tensors_at(self._others)
        for tensor, part in zip(others, torch.split(sent, [t.nbytes for t in others]), strict=True):
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))
        if not self._known:
            self._known = True
            gone_in = self._before.isinf() & ~moved.isnan()  # infinities that stay move by NaN
            sizes = [place.tensor.numel() for place in self._floats]
            _refuse_first(
                self._floats,
                [bool(gone.any()) for gone in torch.split(gone_in, sizes)],
                "is infinite before the first step, so it cannot move by the mean of what virtual "
                "ranks make of it. Begin with a number",
            )
            self._watch([p for p, moves in zip(self._all, changed, strict=True) if moves])

    def _flat(self, tensors: Sequence[Tensor]) -> Tensor:
        if not tensors:
            return self._all[0].tensor.new_empty(0, dtype=self._dtype)
        flat = [tensor if tensor.dim() == 1 else tensor.reshape(-1) for tensor in tensors]
        return torch.cat(flat).to(self._dtype)

    def _bytes(self, tensors: Sequence[Tensor]) -> Tensor:
        parts = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
        return torch.cat(parts).to(self._dtype) if parts else self._no_bytes


def _refuse_first(places: Sequence[BufferPlace], wrong: Sequence[bool], why: str) -> None:
    for place, is_wrong in zip(places, wrong, strict=False):
        if is_wrong:
            raise UserError(
                f"--virtual-ranks: the model's buffer {place.name} {why}, or leave the setting out."
            )


def _tensors_at(places: Sequence[BufferPlace]) -> list[Tensor]:
    return [place.tensor for place in places]


def _marks(places: Sequence[BufferPlace]) -> list[tuple[int, int]]:
    return [(id(tensor), tensor._version) for tensor in _tensors_at(places)]  # noqa: SLF001


def _cut(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


class WriteCheck:
    """Check that forward writes neither the model's parameters nor tensors of its loss."""

    def __init__(self, model: nn.Module, loss: object) -> None:
        self._named: dict[str, Tensor] = {
            f"the model's parameter {name}": p for name, p in model.named_parameters()
        }
        if isinstance(loss, nn.Module):
            self._named |= {f"the loss's buffer {name}": b for name, b in loss.named_buffers()}
            self._named |= {f"the loss's parameter {n}": p for n, p in loss.named_parameters()}
        self._tensors = list(self._named.values())
        self._first = True
        self._marks: list[tuple[int, int]] = []
        self._kept: list[Tensor] = []

    def begin(self) -> None:
        """Remember them as they are before a step."""
        self._marks = self._mark()
        if self._first:  # what is written through `.data` leaves no mark
            self._kept = [tensor.detach().clone() for tensor in self._tensors]

    def check(self) -> None:
        """Check after a virtual rank that none was written."""
        marks = self._mark()
        if marks == self._marks and not self._first:
            return
        wrote = [now != before for now, before in zip(marks, self._marks, strict=True)]
        if self._first:
            tensors = zip(self._tensors, self._kept, strict=True)
            wrote = [w or not torch.equal(t, k) for w, (t, k) in zip(wrote, tensors, strict=True)]
            self._first, self._kept = False, []
        if any(wrote):
            name = list(self._named)[wrote.index(True)]
            raise UserError(
                f"--virtual-ranks: forward writes {name}, once for each virtual rank that a rank "
                "computes, so it would depend on the number of ranks. Keep what forward writes in "
                "a buffer of the model, or leave --virtual-ranks out."
            )

    def _mark(self) -> list[tuple[int, int]]:
        return [(t._version, t.data_ptr()) for t in self._tensors]  # noqa: SLF001
