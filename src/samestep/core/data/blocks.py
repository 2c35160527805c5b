"""One rank's part of consecutive steps, and how an order is cut into these and into micro-steps."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samestep.base.trees import check_rows, narrow, split_rows
from samestep.core.data.order import Order, share, step_range, steps_per_epoch
from samestep.launch.ranks.world import World

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
    """1, or 0 where the rows only stand in for an empty share, so that every rank takes part in
    the step's collectives."""
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
        step = self.first_step + start
        return replace(self, first_step=step, num_steps=num_steps, inputs=inputs, targets=targets)

    def singles(self) -> Iterator["Block"]:
        """Yield the steps one by one, without copying; many times faster than `part` by part."""
        if self.num_steps == 1:
            yield self
            return
        rows, trees = self.rows, (self.inputs, self.targets)
        inputs, targets = (
            torch.split(tree, rows) if isinstance(tree, Tensor) else split_rows(tree, rows)
            for tree in trees
        )
        for step, pair in enumerate(zip(inputs, targets, strict=True), start=self.first_step):
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


class Batch(NamedTuple):
    """Samples to evaluate, on the device."""

    inputs: Any
    targets: Any
    samples: int
    first: int = 0
    """The place of the first of them in the data."""
    part: int = 0
    """The share of the data that they belong to: the rank's, or a virtual rank's."""
    whole: int | None = None
    """Of a loss over the whole batch: the number of the batch of the data that they belong to; of
    carried state: that of the slots in which they follow each other."""
    closes: bool = True
    """Whether that loss is due now; else more samples of the batch follow."""


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
    order: Order, first_step: int, limit: int, global_batch: int, world: World, *, drop_last: bool
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
    order: Order, first_step: int, ends: Sequence[int], world: World
) -> Iterator[Block]:
    """Cut an epoch's order into steps of any size, each of which ends at a given position."""
    for step in range(first_step, len(ends)):
        yield _one_step(order, step, range(ends[step - 1] if step else 0, ends[step]), world)


def _one_step(order: Order, step: int, positions: range, world: World) -> Block:
    mine, weight = _share_or_stand_in(positions, world)
    indices = order[mine.start : mine.stop]
    return Block(step, 1, indices, None, len(mine), weight, len(positions))


def micro_steps(block: Block, cut: Cut | None, world: World) -> Iterator[Block]:
    """Cut a block of indices into micro-steps: those of each virtual rank, if there are any."""
    first = 0
    for part in held_parts(world):
        rows = block.rows
        if world.virtual_ranks:
            rows = len(part_of(range(block.global_size), part, world))
        for start, count, counted in cut(rows, block.global_size) if cut else [(0, rows, rows)]:
            weight = block.weight if counted else 0.0
            whole = count == len(block.inputs)
            indices = block.inputs if whole else block.inputs[first + start : first + start + count]
            step, size = block.first_step, block.global_size
            yield Block(step, 1, indices, None, count, weight, size, place=part, first_row=start)
        first += rows


def held_parts(world: World, rank: int | None = None) -> range:
    """Return the parts that a rank computes, by default this one: its own, or virtual ranks."""
    return share(range(world.num_parts), world.rank if rank is None else rank, world.world_size)


def part_of(positions: range, part: int, world: World) -> range:
    """Return one part's share of some positions."""
    return share(positions, part, world.num_parts)


def _share_or_stand_in(positions: range, world: World) -> tuple[range, float]:
    """Return this rank's positions and weight 1; where it has none, all of them and weight 0.

    Virtual ranks need no stand-in: their collectives do not wait for a backward.
    """
    if not world.virtual_ranks:
        mine = share(positions, world.rank, world.world_size)
        return (mine, 1.0) if mine else (positions, 0.0)
    held = held_parts(world)
    first, last = (part_of(positions, part, world) for part in (held[0], held[-1]))
    return range(first.start, last.stop), 1.0
