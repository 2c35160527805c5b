"""One fixed binary tree over parts 0, 1, 2 …: sums along it have the same bits on any ranks.

Parts are the leaves. Of two neighbours on a level, 2k and 2k + 1, the sum is node k of the level
above; a node without a right neighbour is that node by itself. So the tree depends on the number
of parts only, and only the last parts can be absent.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from samestep.core.data.order import held_parts
from samestep.launch.ranks.world import World

T = TypeVar("T")


class Root(NamedTuple, Generic[T]):
    """The sum of a whole subtree."""

    level: int
    """Leaves have level 0."""
    number: int
    """Place on its level."""
    value: T


class TreeSum(Generic[T]):
    """Add values part by part, as a binary counter counts: few partial sums live at a time.

    `add` returns the sum of two and may reuse the first.
    """

    def __init__(self, add: Callable[[T, T], T]) -> None:
        self._add = add
        self.roots: list[Root[T]] = []
        """The sums of the largest subtrees whose parts are all here, in the order of the parts."""

    def push(self, value: T, number: int, level: int = 0) -> None:
        """Take in the part, or the whole subtree, that follows the last one."""
        while self.roots and number % 2 and self.roots[-1][:2] == (level, number - 1):
            value = self._add(self.roots.pop().value, value)
            level, number = level + 1, number // 2
        self.roots.append(Root(level, number, value))

    def left_of(self, part: int) -> T | None:
        """Pop the part to the left, if this is its right neighbour and it came last."""
        if part % 2 and self.roots and self.roots[-1][:2] == (0, part - 1):
            return self.roots.pop().value
        return None

    def total(self) -> T:
        """Return the sum of all parts, once they are all here, from part 0 on."""
        value = self.roots.pop().value
        while self.roots:
            value = self._add(self.roots.pop().value, value)
        return value


def roots_over(parts: Iterable[int]) -> list[Root[None]]:
    """Return the largest subtrees of consecutive parts; of n parts they are at most 2·log2(n)."""
    tree: TreeSum[None] = TreeSum(lambda _left, _right: None)
    for part in parts:
        tree.push(None, part)
    return tree.roots


def add_up(values: Iterable[T], add: Callable[[T, T], T]) -> T:
    """Return the sum of the values of parts 0, 1, 2 …, of which there is at least one."""
    tree = TreeSum(add)
    for part, value in enumerate(values):
        tree.push(value, part)
    return tree.total()


Tensors = list[Tensor]

_ALIGNED_BYTES = 512
"""Where a tensor may begin: as in memory of its own, so that kernels compute on it alike."""

_SMALL_BYTES = 256 << 10
"""The most that all parts of a bucket may take together for one exchange. An estimate: only the
spiral was measured, whose step on two ranks took 1.9 ms with one exchange and 3.3 ms with two."""

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
    """Sum tensors over all ranks along the tree: all-to-all, local sums, all-gather.

    Each rank sums one shard of every tensor, so it sends and receives as much as in a ring
    all-reduce, 2·(W - 1)/W of the tensors, if the parts of each rank are one subtree. Small tensors
    take one exchange instead of two: every rank gets all parts and sums them, to the same bits.
    `like` has the tensors' shapes, strides and types, on "meta".
    """

    def __init__(self, world: World, like: Sequence[Tensor], bucket_mb: int | None) -> None:
        self._world, self._like = world, like
        self._bucket_bytes = (bucket_mb or 25) << 20
        self._buckets = list(_buckets(like, world.world_size, self._bucket_bytes))
        self._rooms: dict[tuple[str, torch.dtype], Tensor] = {}

    def __call__(self, own: Sequence[Root[Tensors]], present: int) -> Tensors:
        """Return the sums over parts 0 … `present` - 1, the same on every rank.

        `own` are the subtrees that this rank has summed; their tensors are consumed.
        """
        world = self._world
        if world.world_size == 1:
            tree = TreeSum(add_tensors)
            tree.roots = list(own)
            return tree.total()
        held = [held_parts(world, rank) for rank in range(world.world_size)]
        roots = [roots_over(part for part in parts if part < present) for parts in held]
        # A rank's first tensors take the sums.
        empty = partial(torch.empty_like, device=world.device)
        sums = own[0].value if own else [*map(empty, self._like)]
        for bucket in self._buckets:
            self._reduce(bucket, own, roots, sums[bucket.places.start : bucket.places.stop])
        return sums

    def _reduce(
        self,
        bucket: _Bucket,
        own: Sequence[Root[Tensors]],
        roots: Sequence[Sequence[Root[None]]],
        sums: Tensors,
    ) -> None:
        size, places = self._world.world_size, bucket.places
        most = max(len(rank) for rank in roots)
        width, like = size * bucket.shard, self._like[places.start : places.stop]
        is_small = size * most * width * sums[0].element_size() <= _SMALL_BYTES
        rows = self._room("sent", sums[0], most if is_small else max(1, len(own)), width)
        for row, root in zip(rows, own, strict=False):
            torch._foreach_copy_(_views(row, bucket, like), root.value[places.start : places.stop])
            if root is not own[0]:
                root.value[places.start : places.stop] = [_NOTHING] * len(places)
        exchange = self._exchange_once if is_small else self._exchange_shards
        total = exchange(rows, [len(rank) for rank in roots], [r for rank in roots for r in rank])
        torch._foreach_copy_(sums, _views(total, bucket, like))

    def _exchange_once(
        self, rows: Tensor, counts: Sequence[int], roots: Sequence[Root[None]]
    ) -> Tensor:
        """Give every rank all rows of all ranks, padded to equally many; return their sum."""
        most, width = rows.shape
        received = self._room("received", rows, len(counts) * most, width)
        self._world.all_gather_into(received, rows)
        taken = [received[r * most + k] for r, count in enumerate(counts) for k in range(count)]
        return _add_roots(taken, roots)

    def _exchange_shards(
        self, rows: Tensor, counts: Sequence[int], roots: Sequence[Root[None]]
    ) -> Tensor:
        """Give every rank one shard of all rows, gather the shards' sums; return their sum."""
        world = self._world
        size, number = world.world_size, counts[world.rank]
        shard = rows.shape[1] // size
        received = self._room("received", rows, sum(counts), shard)
        sent = rows[:number].view(number, size, shard).transpose(0, 1).contiguous()
        world.all_to_all_into(received, sent, counts)
        world.all_gather_into(rows[0], _add_roots(list(received), roots))  # it is sent already
        return rows[0]

    def _room(self, name: str, like: Tensor, rows: int, columns: int) -> Tensor:
        """Return memory for the exchange, kept from step to step.

        New memory each time would leave holes among the gradients, and the process would grow.
        """
        room = self._rooms.get((name, like.dtype))
        if room is None or room.numel() < rows * columns:
            room = like.new_empty(rows * columns)
            if room.nbytes <= 4 * self._bucket_bytes:  # a larger tensor has a bucket to itself
                self._rooms[name, like.dtype] = room
        return room[: rows * columns].view(rows, columns)


def _add_roots(rows: Sequence[Tensor], roots: Sequence[Root[None]]) -> Tensor:
    """Add up rows, which are the sums of these subtrees, along the tree."""
    tree: TreeSum[Tensor] = TreeSum(Tensor.add_)
    for row, (level, number, _) in zip(rows, roots, strict=True):
        tree.push(row, number, level)
    return tree.total()


def _buckets(like: Sequence[Tensor], world_size: int, most_bytes: int) -> list[_Bucket]:
    """Cut tensors into buckets, each of one type, none larger than `most_bytes` but single ones."""
    starts, size = [0], 0
    for place, tensor in enumerate(like):
        other = tensor.dtype != like[starts[-1]].dtype
        if place and (other or size + tensor.nbytes > most_bytes):
            starts.append(place)
            size = 0
        size += tensor.nbytes
    buckets = []
    for start, stop in pairwise([*starts, len(like)]):
        unit = _ALIGNED_BYTES // like[start].element_size()
        sizes = [-(-like[place].numel() // unit) * unit for place in range(start, stop)]
        *offsets, total = accumulate(sizes, initial=0)
        shard = -(-total // (unit * world_size)) * unit
        buckets.append(_Bucket(range(start, stop), tuple(offsets), max(unit, shard)))
    return buckets


def _views(row: Tensor, bucket: _Bucket, like: Sequence[Tensor]) -> Tensors:
    """Return the tensors of a bucket within a row, laid out as those that they are like."""
    return [
        torch.as_strided(row, tensor.shape, tensor.stride(), row.storage_offset() + offset)
        for tensor, offset in zip(like, bucket.offsets, strict=True)
    ]
