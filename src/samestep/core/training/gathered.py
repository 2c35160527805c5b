"""Rows of all ranks, in the order of the ranks, on every rank."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from samestep.base.errors import UserError
from samestep.launch.ranks.world import World


class Gathered(NamedTuple):
    """Rows of all ranks, in the order of the ranks."""

    tensors: list[Tensor]
    """(rows of all ranks, …) each; none on a rank that gave none."""
    first: int
    """The place of this rank's first row among them."""


def gather_rows(own: Sequence[Tensor], rows: int, world: World, what: str) -> Gathered:
    """Gather tensors of `rows` rows each; ranks may have unequally many, or none.

    A rank that knows no form of a row gives no tensors.

    Raises:
        UserError: on all ranks, where rows are of other shapes or types than on another rank;
            `what` begins the message.
    """
    if not world.connected:
        return Gathered(list(own), 0)
    forms = [(str(t.dtype).removeprefix("torch."), tuple(t.shape[1:])) for t in own]
    width = [t.element_size() * math.prod(t.shape[1:]) for t in own]
    header = torch.tensor([rows, sum(width), crc32(repr(forms).encode()) if own else 0])
    headers = header.new_empty(world.world_size * 3)
    world.all_gather_into(headers, header)
    told = headers.view(-1, 3).tolist()
    if len({code for _, _, code in told if code}) > 1:
        _refuse(world.gather(forms or None), what)
    counts = [count for count, _, _ in told]
    # One behind the other, as bytes: one collective for all tensors, whatever their types.
    most = max(counts) * max(size for _, size, _ in told)
    device = own[0].device if own else world.device
    sent = torch.empty(most, dtype=torch.uint8, device=device)
    start = 0
    for tensor, size in zip(own, width, strict=True):
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        sent[start : start + rows * size] = flat
        start += max(counts) * size
    received = torch.empty(world.world_size * most, dtype=torch.uint8, device=device)
    world.all_gather_into(received, sent)
    of_rank, found, start = received.view(world.world_size, most), [], 0
    for tensor, size in zip(own, width, strict=True):
        cuts = [of_rank[r, start : start + n * size] for r, n in enumerate(counts)]
        shape = (sum(counts), *tensor.shape[1:])
        found.append(torch.cat(cuts).view(tensor.dtype).view(shape))
        start += max(counts) * size
    return Gathered(found, sum(counts[: world.rank]))


def _refuse(forms: Sequence[Any], what: str) -> None:
    having = [(rank, form) for rank, form in enumerate(forms) if form is not None]
    first, ours = having[0]
    other, theirs = next(one for one in having if one[1] != ours)
    one, its = next(
        (pair for pair in zip(ours, theirs, strict=False) if pair[0] != pair[1]), (ours, theirs)
    )
    raise UserError(
        f"{what} cannot be put together: rows on rank {first} are {_form(one)}, on rank {other} "
        f"{_form(its)}. Give rows of one shape and type on all ranks: pad to a fixed length.",
        on_all_ranks=True,
    )


def _form(form: Any) -> str:
    return f"{form[1]} {form[0]}" if isinstance(form, tuple) else f"{len(form)} tensors"
