"""A model's buffers within a step of virtual ranks, such as the statistics of BatchNorm.

Each virtual rank starts from what the buffers were before the step. Afterwards

- a floating-point buffer moves by the mean of what all virtual ranks moved it by, added up along
  the tree;
- any other buffer, such as a count of batches, takes the value that virtual rank 0 gave it.

Both are functions of the virtual ranks alone.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from samestep.errors import UserError


class _Place(NamedTuple):
    """Where a buffer is: a module may put another tensor there."""

    module: nn.Module
    key: str
    name: str

    @property
    def tensor(self) -> Tensor:
        found = self.module._buffers[self.key]  # noqa: SLF001 - what `self.key = …` writes to
        assert found is not None
        return found


class StepBuffers:
    """What the virtual ranks of this rank do to a model's buffers, as a vector to add up.

    The first step finds out which buffers forwards change; only those travel from then on.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._known = False
        self._watch(_places(model))
        self._all = [*self._floats, *self._others]

    def _watch(self, places: Sequence[_Place]) -> None:
        self._floats = [place for place in places if place.tensor.is_floating_point()]
        self._others = [place for place in places if not place.tensor.is_floating_point()]

    @property
    def size(self) -> int:
        """The numbers that `moved` returns in the coming step."""
        flags = 0 if self._known else len(self._all)
        others = sum(place.tensor.nbytes for place in self._others)
        return flags + sum(place.tensor.numel() for place in self._floats) + others

    def begin(self) -> None:
        """Keep what the buffers are before a step."""
        if not self._all:
            return
        self._kept = [(p, p.tensor.clone()) for p in (*self._floats, *self._others)]
        self._before = self._flat()
        self._marks = self._mark()

    @torch.no_grad()
    def moved(self, part: int) -> list[Tensor]:
        """Return what a virtual rank did, and undo it.

        Returns:
            Nothing or vectors: in the first step whether each buffer was changed; by what the
            floating-point ones moved; the bytes of the others, of virtual rank 0 alone.

        Raises:
            UserError: a buffer changed its shape, or not before a later step.
        """
        if not self._all:
            return []
        changed = [now != before for now, before in zip(self._mark(), self._marks, strict=True)]
        found = []
        if not self._known:
            # Kernels of batch normalisation write without counting it as a change.
            wrote = [not torch.equal(place.tensor, kept) for place, kept in self._kept]
            flags = [one or other for one, other in zip(changed, wrote, strict=True)]
            found.append(torch.tensor(flags, dtype=self._dtype, device=self._before.device))
        after = self._flat()
        if after.shape != self._before.shape:
            name = next(p.name for p, kept in self._kept if p.tensor.shape != kept.shape)
            raise UserError(
                f"--virtual-ranks: the model's buffer {name} changes its shape in forward, so what "
                "virtual ranks make of it cannot be added up. Leave the setting out."
            )
        # Where nothing moves, infinities, as in masks, must not become NaN.
        found.append(torch.where(after == self._before, 0.0, after - self._before))
        found += [_bytes(place.tensor, self._dtype) * (part == 0) for place in self._others]
        for place, kept in self._kept:
            place.tensor.copy_(kept)
        self._check_still(changed)
        self._marks = self._mark()
        return found

    @torch.no_grad()
    def settle(self, total: Tensor, present: int) -> None:
        """Give the buffers what all virtual ranks that have samples made of them."""
        if not self._all:
            return
        changed: list[bool] = []
        if not self._known:
            changed = (total[: len(self._all)] > 0).tolist()
            total = total[len(self._all) :]
        moved, place_of = total[: len(self._before)] / present, len(self._before)
        after, start = torch.where(moved == 0, self._before, self._before + moved), 0
        for place in self._floats:
            tensor = place.tensor
            tensor.copy_(after[start : start + tensor.numel()].view(tensor.shape))
            start += tensor.numel()
        for place in self._others:
            tensor = place.tensor
            sent = total[place_of : place_of + tensor.nbytes].to(torch.uint8)
            tensor.copy_(sent.view(tensor.dtype).view(tensor.shape))
            place_of += tensor.nbytes
        if not self._known:
            self._known = True
            self._check_finite(moved)
            self._watch([p for p, moves in zip(self._all, changed, strict=True) if moves])

    def _check_finite(self, moved: Tensor) -> None:
        """Check that no buffer moves away from an infinity: the mean of that is no number."""
        gone_in = self._before.isinf() & (moved != 0)
        sizes = [place.tensor.numel() for place in self._floats]
        for place, gone in zip(self._floats, torch.split(gone_in, sizes), strict=True):
            if gone.any():
                raise UserError(
                    f"--virtual-ranks: the model's buffer {place.name} is infinite before the "
                    "first step, so it cannot move by the mean of what virtual ranks make of it. "
                    "Begin with a number, or leave the setting out."
                )

    def _flat(self) -> Tensor:
        tensors = [place.tensor.reshape(-1).to(self._dtype) for place in self._floats]
        if not tensors:
            return torch.empty(0, dtype=self._dtype, device=self._all[0].tensor.device)
        return torch.cat(tensors)

    def _mark(self) -> list[tuple[int, int]]:
        return [(id(tensor), tensor._version) for place in self._all for tensor in [place.tensor]]  # noqa: SLF001

    def _check_still(self, changed: list[bool]) -> None:
        watched = {*self._floats, *self._others}
        for place, moves in zip(self._all, changed, strict=True):
            if moves and place not in watched:
                raise UserError(
                    f"--virtual-ranks: the model's buffer {place.name} changed in this step, but "
                    "not in the first one, which decides what virtual ranks add up. Let each "
                    "forward of a training step write it, or leave the setting out."
                )


@torch.no_grad()
def keep_buffers(model: nn.Module) -> Callable[[], None]:
    """Return what brings a model's buffers back to what they are now."""
    places = _places(model)
    kept = [place.tensor.clone() for place in places]

    @torch.no_grad()
    def put_back() -> None:
        for place, before in zip(places, kept, strict=True):
            if place.tensor.shape == before.shape and not torch.equal(place.tensor, before):
                place.tensor.copy_(before)

    return put_back


def _places(model: nn.Module) -> list[_Place]:
    return [
        _Place(module, key, f"{prefix}.{key}" if prefix else key)
        for prefix, module in model.named_modules()
        for key, buffer in module._buffers.items()  # noqa: SLF001
        if buffer is not None
    ]


def _bytes(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor's bytes as numbers of another type, which holds each of them exactly."""
    return tensor.contiguous().view(-1).view(torch.uint8).to(dtype)
