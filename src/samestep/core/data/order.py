"""Which samples make up each step, a pure function, and which of them are a rank's.

Every epoch has one global order of all samples, so that resuming is arithmetic. A step takes the
next global batch of it, and each rank a consecutive share of that. The order knows nothing of
ranks, so it is the same on any number of them. A `Block` is one rank's part of consecutive steps.
"""

import hashlib
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from samestep.base.errors import UserError
from samestep.base.settings import OrderName
from samestep.base.trees import check_rows, narrow, split_rows
from samestep.core.data.keyed_random import mix, sample_keys
from samestep.core.recipe import InMemory

if TYPE_CHECKING:
    from samestep.core.data.samplers import SamplerOrder
    from samestep.launch.ranks.world import World

LAZY_FROM = 1 << 24
"""Training samples from which on a shuffled order is computed where it is asked for: a table
would take 128 MiB and half a second in each epoch. Below, runs keep the order they always had."""
_WINDOW = 1 << 16
_ROUNDS = 6
_BATCHES_SORTED = 50
"""Batches that --group-by-length sorts together: more have less padding, and are less random."""
_DRAWS = 0x5EED
"""Keeps what an order draws apart from what samples draw for their augmentation."""


class TokenCut(NamedTuple):
    """Batches of samples of similar length, which have about equally many tokens."""

    sizes: tuple[int, ...]
    """Samples of each batch, the shortest samples first."""
    fits: int
    """Samples of any length that fit into a batch: as many as of the longest."""


@dataclass(frozen=True, kw_only=True)
class Ordering:
    """How the samples of an epoch are ordered, besides by seed and epoch."""

    order: OrderName = "shuffled"
    weights: Tensor | None = None
    """(samples,) float64, for `weighted`: draws are in proportion to them."""
    lengths: Tensor | None = None
    """(samples,) float64, where samples of similar length are put into a batch."""
    batch_tokens: int | None = None
    """The most tokens of a batch, padding included; None where batches are of equal size."""
    sampler: "SamplerOrder | None" = None
    """Of a loader that the recipe brings."""

    @cached_property
    def token_cut(self) -> TokenCut | None:
        """How all samples, sorted by length, are cut into batches; None without `batch_tokens`.

        It is the same in each epoch, whichever of equally long samples are in which batch.
        """
        if self.batch_tokens is None:
            return None
        assert self.lengths is not None
        lengths = self.lengths.clamp(min=1).sort().values.tolist()
        if lengths[-1] > self.batch_tokens:
            longer = sum(length > self.batch_tokens for length in lengths)
            raise UserError(
                f"--batch-tokens {self.batch_tokens} is less than the longest training sample, "
                f"{lengths[-1]:g} tokens ({longer:,} of {len(lengths):,} are longer than that "
                f"limit). Use at least --batch-tokens {math.ceil(lengths[-1])}, or truncate such "
                "samples in the data."
            )
        sizes, start = [], 0
        while start < len(lengths):
            # Sorted, so that each batch's last sample is its longest.
            ends = range(start + 1, len(lengths) + 1)
            fits = bisect_right(
                ends, self.batch_tokens, key=lambda end: lengths[end - 1] * (end - start)
            )
            sizes.append(fits)
            start += sizes[-1]
        return TokenCut(tuple(sizes), int(self.batch_tokens // lengths[-1]))

    def ends(self, seed: int, epoch: int) -> list[int] | None:
        """Return the end of each step in an epoch's order; None if steps are equally large."""
        if self.token_cut is None:
            return None
        shuffled = _shuffled(len(self.token_cut.sizes), mix(seed, _DRAWS, epoch))
        return list(accumulate(self.token_cut.sizes[batch] for batch in shuffled.tolist()))

    @cached_property
    def totals(self) -> Tensor:
        """The running sum of the weights, (samples,) float64."""
        assert self.weights is not None
        return self.weights.cumsum(0)

    def record(self, num_samples: int) -> dict[str, Any]:
        """Return a checkpoint's entries on the order; none for the default one."""
        record: dict[str, Any] = {}
        if self.sampler is not None:
            record["sampler"] = self.sampler.digest
        elif self.order != "shuffled":
            record["order"] = self.order
        elif num_samples >= LAZY_FROM:
            record["permutation"] = "lazy"
        for name in ("weights", "lengths"):
            if (numbers := getattr(self, name)) is not None:
                record[name] = hashlib.sha256(numbers.numpy().data).hexdigest()[:16]
        if self.batch_tokens is not None:
            record["batch_tokens"] = self.batch_tokens
        return record


SHUFFLED = Ordering()


class LazyOrder:
    """An order without a table: it is computed for a window of positions at a time."""

    def __init__(self, length: int, at: Callable[[Tensor], Tensor]) -> None:
        """`at` turns positions in the epoch into samples, both (positions,) int64."""
        self._length, self._at = length, at
        self._first, self._window = 0, torch.empty(0, dtype=torch.int64)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, positions: slice) -> Tensor:
        start, stop, _ = positions.indices(self._length)
        if start < self._first or stop > self._first + len(self._window):
            end = min(max(stop, start + _WINDOW), self._length)
            self._first, self._window = start, self._at(torch.arange(start, end))
        return self._window[start - self._first : stop - self._first]

    def placed(self, place: Callable[[Tensor], Tensor]) -> "LazyOrder":
        """Return the same order, of which each window is put somewhere, as on a device."""
        return LazyOrder(self._length, lambda positions: place(self._at(positions)))


Order = Tensor | LazyOrder
"""The samples of an epoch in their order: has a length, and slices of it are (positions,) int64."""


def epoch_order(
    num_samples: int,
    seed: int,
    epoch: int,
    ordering: Ordering = SHUFFLED,
    *,
    global_batch: int = 1,
    drop_last: bool = False,
) -> Order:
    """Return the order of the samples of an epoch, (samples,) int64.

    Shuffled, sequential and in columns each sample comes once. Drawn with replacement, an epoch has
    as many draws as there are samples.
    """
    if ordering.sampler is not None:
        return ordering.sampler.order(epoch, global_batch)
    if ordering.lengths is not None:
        order = epoch_order(num_samples, seed, epoch)[0:num_samples]
        if ordering.token_cut is not None:
            return _by_tokens(order, ordering, mix(seed, _DRAWS, epoch))
        return _grouped(order, ordering.lengths, global_batch, mix(seed, _DRAWS, epoch))
    if ordering.order == "shuffled" and num_samples < LAZY_FROM:
        return _shuffled(num_samples, mix(seed, epoch))
    drawn = partial(sample_keys, mix(seed, _DRAWS), epoch)  # a key for each position
    at: Callable[[Tensor], Tensor]
    match ordering.order:
        case "shuffled":
            at = partial(permuted, num_samples, mix(seed, epoch))
        case "sequential":
            at = torch.clone
        case "columns":
            at = partial(_in_columns, num_samples, global_batch, drop_last=drop_last)
        case "replacement":
            at = lambda positions: (drawn(positions) & _POSITIVE) % num_samples  # noqa: E731
        case "weighted":
            at = lambda positions: _by_weight(ordering.totals, drawn(positions))  # noqa: E731
    return LazyOrder(num_samples, at)


_POSITIVE = (1 << 63) - 1


def permuted(num_samples: int, key: int, positions: Tensor) -> Tensor:
    """Return the samples at some positions of a random permutation, without its table.

    A Feistel network (Luby & Rackoff 1988, "How to construct pseudorandom permutations from
    pseudorandom functions") permutes the numbers below the next power of two. One that leads out of
    the range is permuted again until it is back (Black & Rogaway 2002, "Ciphers with arbitrary
    finite domains"): a cycle of a permutation returns to where it began.
    """
    bits = max(2, (num_samples - 1).bit_length())
    samples = _feistel(positions, bits, key)
    while len(outside := (samples >= num_samples).nonzero().view(-1)):
        samples[outside] = _feistel(samples[outside], bits, key)
    return samples


def _feistel(numbers: Tensor, bits: int, key: int) -> Tensor:
    """Permute the numbers below 2**bits; the halves differ by a bit where `bits` is odd."""
    wide, narrow = bits - bits // 2, bits // 2
    left, right = numbers >> narrow, numbers & ((1 << narrow) - 1)
    for turn in range(_ROUNDS):  # an even number: the halves have their widths again
        width = narrow if turn % 2 else wide
        left, right = right, left ^ (sample_keys(key, turn, right) & ((1 << width) - 1))
    return left << narrow | right


def _in_columns(
    num_samples: int, global_batch: int, positions: Tensor, *, drop_last: bool
) -> Tensor:
    """Return the samples at some positions where each slot of a step reads a part of the data."""
    size, longer = divmod(num_samples, global_batch)
    if drop_last:  # all columns end together, and what is left lies behind the last one
        longer = 0
    slot, step = positions % global_batch, positions // global_batch
    return slot * size + slot.clamp(max=longer) + step


def _by_weight(totals: Tensor, keys: Tensor) -> Tensor:
    """Return a sample for each key, in proportion to the weights whose running sum is given."""
    uniform = ((keys >> 11) & ((1 << 53) - 1)).double() * 2.0**-53
    # To the right of equal sums: a sample of weight 0 adds nothing and is never drawn.
    return torch.searchsorted(totals, uniform * totals[-1], right=True)


def _grouped(order: Tensor, lengths: Tensor, global_batch: int, seed: int) -> Tensor:
    """Return a shuffled order with samples of similar length in each batch.

    Within windows of several batches it is sorted by length and cut; then the batches are shuffled.
    The samples of a batch keep their order, so that no rank has the longest of all batches.
    The incomplete last batch is of any length, so that it is not always the same kind.
    """
    full = len(order) // global_batch * global_batch
    cut = []
    for window in torch.split(torch.arange(full), _BATCHES_SORTED * global_batch):
        by_length = window[lengths[order[window]].argsort(stable=True)]
        cut.append(by_length.view(-1, global_batch).sort(dim=1).values)
    if not cut:
        return order
    batches = torch.cat(cut)
    shuffled = _shuffled(len(batches), seed)
    return torch.cat([order[batches[shuffled].view(-1)], order[full:]])


def _by_tokens(order: Tensor, ordering: Ordering, seed: int) -> Tensor:
    """Return a shuffled order in which the batches of the token cut follow on each other.

    Equally long samples are in other batches in each epoch, and those of a batch keep their order.
    """
    assert ordering.lengths is not None
    assert ordering.token_cut is not None
    sizes = torch.tensor(ordering.token_cut.sizes)
    place = torch.empty_like(sizes)
    place[_shuffled(len(sizes), seed)] = torch.arange(len(sizes))
    by_length = ordering.lengths[order].argsort(stable=True)
    batch_of = torch.empty_like(order)
    batch_of[by_length] = place.repeat_interleave(sizes)
    return order[batch_of.argsort(stable=True)]


def _shuffled(number: int, seed: int) -> Tensor:
    return torch.randperm(number, generator=torch.Generator().manual_seed(seed))


def steps_per_epoch(num_samples: int, global_batch: int, *, drop_last: bool = False) -> int:
    """Return the number of global batches in an epoch, an incomplete last one included."""
    return num_samples // global_batch if drop_last else -(-num_samples // global_batch)


def step_range(num_samples: int, global_batch: int, step: int) -> range:
    """Return the positions in the epoch's order that one step of the epoch takes."""
    return range(step * global_batch, min((step + 1) * global_batch, num_samples))


def share(positions: range, rank: int, world_size: int) -> range:
    """Return a rank's part of some positions; shares differ by at most one, larger ones first."""
    size, extra = divmod(len(positions), world_size)
    start = positions.start + rank * size + min(rank, extra)
    return range(start, start + size + (rank < extra))


Read = Iterator[tuple["Block", Any, Any]]
"""Blocks of indices, each with the stored inputs and the targets of its samples."""
Cut = Callable[[int, int], list[tuple[int, int, int]]]
"""(rows of this rank, samples of the step) → its micro-steps: first row, rows, rows that count."""
Lap = Callable[[str], None]
"""Told where reading samples ends ("data") and where copying them to the device does."""


def untimed(_phase: str) -> None:
    """Measure no time."""


@dataclass(frozen=True, slots=True)
class Block:
    """One rank's part of consecutive steps of an epoch, each with the same number of samples."""

    first_step: int
    """Position in the epoch of the first step."""
    num_steps: int
    inputs: Any
    """(num_steps × rows, …) on the device, ready for the model; a tensor or a tree of tensors.
    Before the samples are read: their indices, (num_steps × rows,) int64."""
    targets: Any
    """(num_steps × rows, …) on the device; None before the samples are read."""
    rows: int
    """Rows of this rank in each step."""
    weight: float
    """1, or 0 where rows stand in for an empty share, so that every rank joins the collectives."""
    global_size: int
    """Samples of each step over all ranks."""
    parts: "tuple[Block, ...]" = ()
    """The micro-steps, where each was collated by itself; then `inputs` are the indices still."""
    last: bool = False
    """Of a stream: whether it ends with this block."""
    place: int = 0
    """Of a micro-step: its virtual rank."""
    first_row: int = 0
    """Of a micro-step: its first row in the share of its rank, or virtual rank."""

    def part(self, start: int, num_steps: int) -> "Block":
        """Return some of the steps, from the `start`-th of this block, without copying."""
        if num_steps == self.num_steps:
            return self
        first, length = start * self.rows, num_steps * self.rows
        inputs, targets = (narrow(tree, first, length) for tree in (self.inputs, self.targets))
        of_steps = self.rows, self.weight, self.global_size, self.parts, self.last
        return Block(self.first_step + start, num_steps, inputs, targets, *of_steps)

    def singles(self) -> Iterator["Block"]:
        """Yield the steps one by one, without copying; many times faster than `part` by part."""
        if self.num_steps == 1:
            yield self
            return
        rows, whole = self.rows, self.targets is self.inputs
        trees = [
            torch.split(tree, rows) if isinstance(tree, Tensor) else split_rows(tree, rows)
            for tree in ([self.inputs] if whole else [self.inputs, self.targets])
        ]
        for step, pair in enumerate(zip(trees[0], trees[-1], strict=True), start=self.first_step):
            yield Block(step, 1, *pair, rows, self.weight, self.global_size)

    def with_samples(self, inputs: Any, targets: Any, parts: "tuple[Block, ...]" = ()) -> "Block":
        """Return this block with its samples; faster than by `replace`."""
        first, count, rows, size = self.first_step, self.num_steps, self.rows, self.global_size
        samples = (inputs, targets, rows, self.weight, size, parts)
        return Block(first, count, *samples, self.last, self.place, self.first_row)

    def steps_of_indices(self) -> Iterator["Block"]:
        """Yield the steps one by one, before the samples are read."""
        rows = self.inputs.view(self.num_steps, self.rows).unbind()
        for step, indices in enumerate(rows, start=self.first_step):
            yield Block(step, 1, indices, None, self.rows, self.weight, self.global_size)


def cut_rows(
    rows: int, global_size: int, *, batch_size: int, world_size: int = 1, together: bool = False
) -> list[tuple[int, int, int]]:
    """Cut a rank's rows of a step into micro-steps of at most `batch_size` rows.

    Each is (first row, rows, rows that count). With `together`, every rank has equally many: where
    one has no rows left, a row that does not count stands in.
    """
    if not together:
        starts = range(0, rows, batch_size)
        return [(s, min(batch_size, rows - s), min(batch_size, rows - s)) for s in starts]
    largest = -(-global_size // world_size)
    num = -(-largest // batch_size)
    shares = [share(range(rows), part, num) for part in range(num)]
    return [(s.start, len(s), len(s)) if len(s) else (0, 1, 0) for s in shares]


def cut_block(block: Block, cuts: Sequence[tuple[int, int, int]]) -> Sequence[Block]:
    """Cut the samples of a rank's step into micro-steps, as `cut_rows` says."""
    if len(cuts) == 1 and cuts[0] == (0, block.rows, block.rows):
        return (block,)
    check_rows((block.inputs, block.targets), block.rows)
    parts, step, size = [], block.first_step, block.global_size
    for start, count, counted in cuts:
        inputs = narrow(block.inputs, start, count)
        same = block.targets is block.inputs
        targets = inputs if same else narrow(block.targets, start, count)
        weight = block.weight if counted else 0.0
        parts.append(Block(step, 1, inputs, targets, count, weight, size, first_row=start))
    return parts


def group_steps(
    order: Order, first_step: int, limit: int, global_batch: int, world: "World", *, drop_last: bool
) -> Iterator[Block]:
    """Cut an epoch's order into blocks of indices, of at most `limit` steps of equal size."""
    num_samples = len(order)
    num_full = num_samples // global_batch
    mine, weight = _share_or_stand_in(range(global_batch), world)
    step = first_step
    while step < num_full:
        # Aligned to the start of the epoch, so that a resumed epoch has the same blocks.
        count = min(limit - step % limit, num_full - step)
        indices = order[step * global_batch : (step + count) * global_batch]
        if len(mine) < global_batch:
            indices = indices.view(count, global_batch)[:, mine.start : mine.stop].reshape(-1)
        yield Block(step, count, indices, None, len(mine), weight, global_batch)
        step += count
    if step < steps_per_epoch(num_samples, global_batch, drop_last=drop_last):
        yield _one_step(order, step, step_range(num_samples, global_batch, step), world)


def uneven_steps(
    order: Order, first_step: int, ends: Sequence[int], world: "World"
) -> Iterator[Block]:
    """Cut an epoch's order into steps of any size, each of which ends at a given position."""
    for step in range(first_step, len(ends)):
        yield _one_step(order, step, range(ends[step - 1] if step else 0, ends[step]), world)


def _one_step(order: Order, step: int, positions: range, world: "World") -> Block:
    mine, weight = _share_or_stand_in(positions, world)
    indices = order[mine.start : mine.stop]
    return Block(step, 1, indices, None, len(mine), weight, len(positions))


def micro_steps(block: Block, cut: Cut | None, world: "World") -> Iterator[Block]:
    """Cut a block of indices into micro-steps: those of each virtual rank, if there are any."""
    first = 0
    for part in held_parts(world):
        rows = block.rows
        if world.virtual_ranks:
            rows = len(part_of(range(block.global_size), part, world))
        for start, count, counted in cut(rows, block.global_size) if cut else [(0, rows, rows)]:
            whole = count == len(block.inputs)
            if whole and counted and part == block.place:
                yield block
                continue
            weight = block.weight if counted else 0.0
            indices = block.inputs if whole else block.inputs[first + start : first + start + count]
            step, size = block.first_step, block.global_size
            yield Block(step, 1, indices, None, count, weight, size, place=part, first_row=start)
        first += rows


def held_parts(world: "World", rank: int | None = None) -> range:
    """Return the parts that a rank computes, by default this one: its own, or virtual ranks."""
    return share(range(world.num_parts), world.rank if rank is None else rank, world.world_size)


def part_of(positions: range, part: int, world: "World") -> range:
    """Return one part's share of some positions."""
    return share(positions, part, world.num_parts)


def _share_or_stand_in(positions: range, world: "World") -> tuple[range, float]:
    """Return this rank's positions and weight 1; where it has none, all of them and weight 0.

    Virtual ranks need no stand-in: their collectives do not wait for a backward.
    """
    if not world.virtual_ranks:
        mine = share(positions, world.rank, world.world_size)
        return (mine, 1.0) if mine else (positions, 0.0)
    held = held_parts(world)
    first, last = (part_of(positions, part, world) for part in (held[0], held[-1]))
    return range(first.start, last.stop), 1.0


def split_indices(num_samples: int, fractions: tuple[float, ...], seed: int) -> list[Tensor]:
    """Return disjoint random index sets that together hold every sample.

    Args:
        num_samples: samples to share out.
        fractions: of each part but the last, which takes the rest.
        seed: of the shuffle.
    """
    order = _shuffled(num_samples, seed)
    sizes = [int(num_samples * fraction) for fraction in fractions]
    sizes.append(num_samples - sum(sizes))
    if min(sizes) < 1:
        parts = " and ".join(map(str, fractions))
        raise UserError(
            f"{num_samples} samples are too few to split into parts of {parts} and the rest: one "
            "of them would be empty. Use more samples."
        )
    return list(torch.split(order, sizes))


def hold_out(data: InMemory, fraction: float, seed: int) -> tuple[InMemory, InMemory]:
    """Return inputs and targets for training, and a random part that is held out of them."""
    held_out, trained = split_indices(len(data[0]), (fraction,), seed)
    return (data[0][trained], data[1][trained]), (data[0][held_out], data[1][held_out])
