"""What all ranks have, on every rank: rows, in the order of the ranks; what a metric is made of."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from samestep.base.errors import UserError
from samestep.base.trees import describe, map_leaves, tree_leaves
from samestep.launch.ranks.world import World


class Gathered(NamedTuple):
    """Rows of all ranks, in the order of the ranks."""

    tensors: list[Tensor]
    """(rows of all ranks, …) each; none on a rank that gave none."""
    first: int
    """The place of this rank's first row among them."""


def gather_rows(own: Sequence[Tensor], rows: int, world: World, subject: str) -> Gathered:
    """Gather tensors of `rows` rows each; ranks may have unequally many, or none.

    A rank that knows no form of a row gives no tensors.

    Raises:
        UserError: on all ranks, where rows are of other shapes or types than on another rank;
            `subject` begins the message.
    """
    if not world.connected:
        return Gathered(list(own), 0)
    forms = [(str(t.dtype).removeprefix("torch."), tuple(t.shape[1:])) for t in own]
    width = [t.element_size() * math.prod(t.shape[1:]) for t in own]
    header = torch.tensor([rows, sum(width), crc32(repr(forms).encode()) if own else 0])
    headers = header.new_empty(world.world_size * 3)
    world.all_gather_into(headers, header)
    of_ranks = headers.view(-1, 3).tolist()
    if len({code for _, _, code in of_ranks if code}) > 1:
        _refuse(world.gather(forms or None), subject)
    counts = [count for count, _, _ in of_ranks]
    # One behind the other, as bytes: one collective for all tensors, whatever their types.
    most = max(counts) * max(size for _, size, _ in of_ranks)
    device = own[0].device if own else world.device
    sent = torch.empty(most, dtype=torch.uint8, device=device)
    start = 0
    for tensor, size in zip(own, width, strict=True):
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        sent[start : start + rows * size] = flat
        start += max(counts) * size
    received = torch.empty(world.world_size * most, dtype=torch.uint8, device=device)
    world.all_gather_into(received, sent)
    of_rank = received.view(world.world_size, most)
    whole = []
    start = 0
    for tensor, size in zip(own, width, strict=True):
        cuts = [of_rank[r, start : start + n * size] for r, n in enumerate(counts)]
        whole.append(torch.cat(cuts).view(tensor.dtype).view((sum(counts), *tensor.shape[1:])))
        start += max(counts) * size
    return Gathered(whole, sum(counts[: world.rank]))


def _refuse(forms: Sequence[Any], subject: str) -> None:
    having = [(rank, form) for rank, form in enumerate(forms) if form is not None]
    first, ours = having[0]
    other, theirs = next(one for one in having if one[1] != ours)
    one, its = next(
        (pair for pair in zip(ours, theirs, strict=False) if pair[0] != pair[1]), (ours, theirs)
    )
    raise UserError(
        f"{subject} cannot be put together: rows on rank {first} are {_form(one)}, on rank {other} "
        f"{_form(its)}. Give rows of one shape and type on all ranks: pad to a fixed length.",
        on_all_ranks=True,
    )


def _form(form: Any) -> str:
    return f"{form[1]} {form[0]}" if isinstance(form, tuple) else f"{len(form)} tensors"


_FIELD = 'Recipe(loss_over="batch")'


def rows_of(tree: Any, rows: int, subject: str, field: str = _FIELD) -> list[Tensor]:
    """Return the tensors of a tree, each with a row for each sample; a single number repeats."""
    columns = []
    for leaf in tree_leaves(tree):
        if not isinstance(leaf, Tensor):
            if leaf is None or (subject == "outputs" and isinstance(leaf, int | float)):
                continue
            raise UserError(
                f"{field}: the {subject} hold {describe(leaf)}, and only tensors are "
                "put together from all ranks. Turn names into numbers, or leave them out of "
                "the batch."
            )
        if leaf.dim() and len(leaf) != rows:
            raise UserError(
                f"{field}: the {subject} of {rows} samples hold {describe(leaf)}, which has "
                "no row for each sample, so the batch of all ranks cannot be put "
                "together. Give each sample a row (pad to a fixed length), or one number for all."
            )
        columns.append(leaf.detach() if leaf.dim() else leaf.detach().repeat(rows))
    return columns


def joined(column: Sequence[Tensor], field: str = _FIELD) -> Tensor:
    """Return the rows of several micro-steps in new memory."""
    shapes = {tuple(t.shape[1:]) for t in column}
    if len(shapes) > 1:
        first, other = sorted(shapes)[:2]
        raise UserError(
            f"{field}: the batch cannot be put together: rows are {first} in one micro-step and "
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


class ComputedOnce:
    """A metric object that takes something of each batch, and computes once, from all ranks'."""

    evaluated_alone, device = True, "cpu"
    _reductions = {"seen": None}  # noqa: RUF012 - as of a metric of torchmetrics
    take: Callable[[Any], Any]

    def __init__(self, by: Any) -> None:
        self.by = by
        self.reset()

    def to(self, _device: Any) -> None:
        """Stay on the CPU."""

    def reset(self) -> None:
        """Begin anew."""
        self.seen: list[Any] = []
        self._update_count = 0

    def update(self, outputs: Any, _batch: Any) -> None:
        """Take in a batch."""
        self.seen.append(self.take(outputs))
        self._update_count += 1
