"""Add tensors over the parts of all ranks, along the tree: all-to-all, local sums, all-gather.

Each rank sums one shard of every tensor, so it sends and receives what a ring all-reduce would,
2·(W - 1)/W of the tensors, wherever the parts of each rank are one subtree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from samestep.data.blocks import held_parts
from samestep.ranks.world import World
from samestep.training.tree import Root, TreeSum, roots_over

Tensors = list[Tensor]
_ALIGNED_BYTES = 512
"""Where a tensor may begin: as in memory of its own, so that kernels compute on it alike."""
_NOTHING = torch.empty(0)


def add_tensors(left: Tensors, right: Tensors) -> Tensors:
    """Add the right tensors to the left ones; return those."""
    torch._foreach_add_(left, right)
    return left


@dataclass(frozen=True)
class _Bucket:
    """Tensors that travel together, one behind the other in a row that is cut into shards."""

    places: range
    """Of its tensors among all of them."""
    offsets: tuple[int, ...]
    """Where each begins in the row, in elements."""
    shard: int
    """Elements of each rank's part of the row."""


class TreeReduce:
    """Sums over all ranks of tensors that are alike each time.

    Args:
        world: this rank among the others.
        like: tensors of the same shapes, strides and types, without memory (on "meta").
        bucket_mb: MiB that are exchanged at once.
    """

    def __init__(self, world: World, like: Sequence[Tensor], bucket_mb: int | None) -> None:
        self._world, self._like = world, like
        self._buckets = list(_buckets(like, world.world_size, (bucket_mb or 25) << 20))

    def __call__(self, own: Sequence[Root[Tensors]], present: int) -> Tensors:
        """Return the sums over parts 0 … `present` - 1, the same on every rank.

        Args:
            own: the subtrees that this rank has summed; their tensors are given up.
            present: the number of parts that have samples; the last ones may have none.
        """
        world = self._world
        if world.world_size == 1:
            tree = TreeSum(add_tensors)
            tree.roots = list(own)
            return tree.total()
        held = [held_parts(world, rank) for rank in range(world.world_size)]
        roots = [roots_over(part for part in parts if part < present) for parts in held]
        sums: Tensors = []
        for bucket in self._buckets:
            sums += self._reduced(bucket, own, roots)
        return sums

    def _reduced(
        self, bucket: _Bucket, own: Sequence[Root[Tensors]], roots: Sequence[Sequence[Root[None]]]
    ) -> Tensors:
        like = [self._like[place] for place in bucket.places]
        size = self._world.world_size
        sent = torch.empty(
            len(own), size * bucket.shard, dtype=like[0].dtype, device=self._world.device
        )
        for row, root in zip(sent, own, strict=True):
            torch._foreach_copy_(_views(row, bucket, like), [root.value[p] for p in bucket.places])
            for place in bucket.places:
                root.value[place] = _NOTHING
        if len(own) > 1:
            sent = sent.view(len(own), size, bucket.shard).transpose(0, 1).contiguous()
        received = self._world.all_to_all(
            sent.view(size, len(own), bucket.shard), [len(rank) for rank in roots], len(own)
        )
        tree: TreeSum[Tensor] = TreeSum(Tensor.add_)
        in_order = [root for rank in roots for root in rank]
        for row, (level, number, _) in zip(received, in_order, strict=True):
            tree.push(row, number, level)
        # What was sent is not needed any more; a rank without a part has sent nothing.
        room = sent.view(-1) if len(own) else received.new_empty(size * bucket.shard)
        whole = room[: size * bucket.shard]
        self._world.all_gather_into(whole, tree.total())
        return _views(whole, bucket, like)


def _buckets(like: Sequence[Tensor], world_size: int, most_bytes: int) -> list[_Bucket]:
    """Cut tensors into buckets, each of one type, none larger than `most_bytes` unless alone."""
    starts, size = [0], 0
    for place, tensor in enumerate(like):
        other = tensor.dtype != like[starts[-1]].dtype
        if place and (other or size + tensor.nbytes > most_bytes):
            starts.append(place)
            size = 0
        size += tensor.nbytes
    found = []
    for start, stop in zip(starts, [*starts[1:], len(like)], strict=True):
        unit = _ALIGNED_BYTES // like[start].element_size()
        sizes = [-(-like[place].numel() // unit) * unit for place in range(start, stop)]
        *offsets, total = accumulate(sizes, initial=0)
        shard = -(-total // (unit * world_size)) * unit
        found.append(_Bucket(range(start, stop), tuple(offsets), max(unit, shard)))
    return found


def _views(row: Tensor, bucket: _Bucket, like: Sequence[Tensor]) -> Tensors:
    """Return the tensors of a bucket, laid out as those that they are like."""
    return [
        torch.as_strided(row, tensor.shape, tensor.stride(), row.storage_offset() + offset)
        for tensor, offset in zip(like, bucket.offsets, strict=True)
    ]
