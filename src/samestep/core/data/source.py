"""What reads a data set as blocks, from memory or from files: the same for the same arguments."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, tee
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samestep.base.errors import UserError, blame, defined_at
from samestep.base.trees import describe, map_tensors, tree_leaves
from samestep.core.data.keyed_random import sample_keys
from samestep.core.data.order import (
    LAZY_FROM,
    SHUFFLED,
    Block,
    Cut,
    Lap,
    Order,
    Ordering,
    Read,
    TokenCut,
    epoch_order,
    group_steps,
    held_parts,
    micro_steps,
    part_of,
    share,
    uneven_steps,
    untimed,
)
from samestep.core.recipe import Augment, Collate, Transform
from samestep.launch.ranks.world import World


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
    places: Sequence[int] = ()
    """Of carried state: the place of each sample in the data, as they do not follow each other."""


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How samples become the batches of one rank."""

    world: World
    seed: int
    """Of the order, of the augmentation, and of what a data set draws."""
    dtype: torch.dtype | None
    """Of floating-point inputs and targets; None leaves them as they are."""
    transform: Transform | None = None
    """Stored inputs → model inputs."""
    augment: Augment | None = None
    """(inputs, keys) → inputs, before `transform` and only for training."""
    collate: Collate | None = None
    """Samples of a data set → a batch of them."""
    whole: bool = False
    """Whether a batch stays one thing, which is both inputs and targets."""
    loss_batch: int | None = None
    """Of a loss over the whole batch: the samples of such a batch in an evaluation."""
    slots: int | None = None
    """Of carried state: the slots of an evaluation, in which samples follow each other."""
    ordering: Ordering = SHUFFLED
    """Of the samples of a data set, in training."""
    shuffle_buffer: int = 0
    """Elements of a stream that are shuffled together, in training."""
    lap: Lap = untimed
    """Told where reading ends ("data"), and copying to the device ("to_device")."""
    split: str = ""
    """Which of the recipe's splits is read."""

    @property
    def data(self) -> str:
        """What a message calls the data, as the subject of a sentence."""
        return f"The recipe's {self.split} data" if self.split else "The data"


_MOST_SAMPLES = 1 << 48
"""More than any data has: of one that repeats itself without end."""


_GROUPED, _GROUPED_SAMPLES = 64, 1 << 16
"""Steps, and samples of them, whose indices are cut at once."""


class Source(ABC):
    """What yields blocks to train on and batches to evaluate: a data set, or a stream."""

    num_samples: int
    """0 for a stream, whose length is unknown."""
    token_cut: TokenCut | None = None
    """How training batches are cut where they are of equally many tokens."""
    held_bytes: int = 0
    """Bytes of the samples that it keeps in memory, all of them on every rank."""
    _rows_are_samples = False
    """Whether each tensor of a batch must have a row for each sample; of graphs it need not."""
    _collates = False
    """Whether the recipe collates batches, so that they cannot be cut afterwards."""

    def __init__(self, reading: ReadOptions) -> None:
        self._reading, self._world = reading, reading.world

    @property
    def is_stream(self) -> bool:
        """Whether it is read from its beginning on, not by index."""
        return self.num_samples == 0

    @property
    def collates(self) -> bool:
        """Whether a function of the user's puts samples together."""
        return self._collates

    def agree(self) -> None:  # noqa: B027 - of data of known length the ranks compare more
        """Check that all ranks read the same stream."""

    def order_record(self) -> dict[str, Any]:
        """Return a checkpoint's entries on the order, beyond seed and sizes."""
        return {}

    def marks_at(self, epoch: int, step: int) -> dict[int, Any]:  # noqa: ARG002
        """Return this rank's positions in a stream after `step` steps of an epoch."""
        return {}

    def start_from(self, epoch: int, step: int, marks: dict[int, Any]) -> None:  # noqa: B027
        """Let reading a stream start at these marks once these steps of that epoch are taken."""

    def steps_per_block(self, global_batch: int) -> int:  # noqa: ARG002 - memory asks for it
        """Return the most steps that a block holds: a power of two."""
        return 1

    def blocks(
        self,
        epoch: int,
        first_step: int,
        *,
        global_batch: int,
        drop_last: bool,
        cut: Cut | None = None,
    ) -> Iterator[Block]:
        """Yield this rank's part of the steps of a training epoch, from `first_step` on.

        Where micro-steps are collated one by one, `cut` says which rows each has; by default a
        step is one micro-step. They then come as the `parts` of the step's block.
        """
        steps = self._unread(epoch, first_step, global_batch, cut, drop_last=drop_last)
        blocks, again = tee(steps)
        ready = self._ready(chain.from_iterable(parts for _, parts in again), epoch)
        try:
            for block, parts in blocks:
                done = tuple(islice(ready, len(parts)))
                yield block.with_samples(block.inputs, None, done) if self._in_parts else done[0]
            next(ready, None)  # where batches are copied ahead, it has what went wrong
        finally:
            ready.close()
            steps.close()

    @property
    def _in_parts(self) -> bool:
        """Whether the micro-steps of a step are read and finished one by one."""
        return self._collates

    @abstractmethod
    def _unread(
        self, epoch: int, first_step: int, global_batch: int, cut: Cut | None, *, drop_last: bool
    ) -> Generator[tuple[Block, Sequence[Block]]]:
        """Yield steps before they are read, each with its micro-steps.

        Steps that need no cutting may come as one block of several steps.
        """

    @abstractmethod
    def evaluation(self, batch_size: int) -> Iterator[Batch]:
        """Yield this rank's share of all samples once, as batches of inputs and targets."""

    @abstractmethod
    def peek(self, samples: int) -> Batch:
        """Return the first samples, as an evaluation reads them."""

    @abstractmethod
    def _read(self, unread: Iterator[Block], epoch: int) -> Read:
        """Yield blocks of indices with their stored inputs and their targets, on the device."""

    def _ready(self, unread: Iterator[Block], epoch: int) -> Generator[Block]:
        """Yield blocks with what the model takes, from blocks of indices."""
        for block, stored, targets in self._read(unread, epoch):
            rows = block.rows * block.num_steps
            inputs = self._augmented(stored, rows, epoch, block.inputs)
            inputs, targets = self._finish(inputs, targets, rows)  # noqa: PLW2901
            yield block.with_samples(inputs, targets)

    def _augmented(self, stored: Any, rows: int, epoch: int, indices: Tensor) -> Any:
        """Return the inputs of some samples as they are in this epoch of a training."""
        if (augment := self._reading.augment) is None:
            return stored
        from samestep.core.data.prefetch import send  # noqa: PLC0415

        keys = self._keys(epoch, send(indices, self._world.device))
        return self._call("augment", rows, augment, stored, keys)

    def _keys(self, epoch: int, indices: Tensor) -> Tensor:
        return sample_keys(self._reading.seed, epoch, indices)

    def close(self) -> None:  # noqa: B027 - memory needs no end
        """End what reads the data; it cannot be read any more."""

    def _finish(self, inputs: Any, targets: Any, rows: int) -> tuple[Any, Any]:
        """Return the inputs as the model takes them, and the targets."""
        if (transform := self._reading.transform) is not None:
            inputs = self._call("transform", rows, transform, inputs)
        inputs = self._cast(inputs)
        if not self._reading.whole:
            return inputs, targets
        batch = inputs if targets is None else (inputs, targets)
        return batch, batch

    def _call(self, name: str, rows: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a recipe's function with a batch of inputs, and check its result."""
        try:
            result = function(*arguments)
        except Exception as error:
            blame(f"The {name} failed, with inputs {describe(arguments[0])}", error, function)
        for leaf in tree_leaves(result):
            is_batch = isinstance(leaf, Tensor) and leaf.dim() > 0
            if not is_batch or (self._rows_are_samples and len(leaf) != rows):
                raise UserError(
                    f"The {name}{defined_at(function)} returned {describe(leaf)} for "
                    f"{rows} samples; it must return the inputs, a row for each sample."
                )
        return result

    def _cast(self, tree: Any) -> Any:
        dtype = self._reading.dtype
        if dtype is None:
            return tree
        if isinstance(tree, Tensor) and tree.dtype == dtype:
            return tree
        return map_tensors(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, tree)


class OrderedSource(Source):
    """A data set of known length, read in an order of samples."""

    _order_device = torch.device("cpu")

    def __init__(self, num_samples: int, reading: ReadOptions) -> None:
        if num_samples == 0:
            raise UserError(
                f"{reading.data} has no samples. Check the files that it reads, or leave out the "
                "split that has none."
            )
        if num_samples > _MOST_SAMPLES:
            raise UserError(
                f"{reading.data} says that it has {num_samples:,} samples. One that repeats "
                "forever has no epochs: remove the repetition, and set --epochs."
            )
        super().__init__(reading)
        sampler = reading.ordering.sampler
        self.num_samples = num_samples if sampler is None else sampler.num_drawn
        self._all = range(num_samples)
        self.token_cut = reading.ordering.token_cut
        self._table: tuple[int, Tensor] | None = None
        """An epoch, and the keys of all samples in it."""

    @property
    def _in_parts(self) -> bool:
        # The share of a virtual rank is made by itself, too: a kernel may round otherwise where
        # rows begin elsewhere in memory.
        cut_by_itself = self.token_cut is not None  # its micro-steps are not of equal size
        return self._collates or cut_by_itself or self._world.virtual_ranks > 0

    def order(self, epoch: int, global_batch: int, *, drop_last: bool) -> Order:
        """Return the order of the samples in an epoch, whatever the ranks."""
        reading, number = self._reading, self.num_samples
        cut: Any = {"global_batch": global_batch, "drop_last": drop_last}
        return epoch_order(number, reading.seed, epoch, reading.ordering, **cut)

    def order_record(self) -> dict[str, Any]:
        """Return the entries on the order, beyond seed and sizes."""
        return self._reading.ordering.record(self.num_samples)

    def _unread(
        self, epoch: int, first_step: int, global_batch: int, cut: Cut | None, *, drop_last: bool
    ) -> Generator[tuple[Block, Sequence[Block]]]:
        world = self._world
        order = self.order(epoch, global_batch, drop_last=drop_last)
        if self._order_device.type != "cpu":
            from samestep.core.data.prefetch import send  # noqa: PLC0415

            to_device = partial(send, device=self._order_device)
            order = to_device(order) if isinstance(order, Tensor) else order.placed(to_device)
        most = self.steps_per_block(global_batch)
        singly = most == 1 or self._in_parts
        most = max(1, min(_GROUPED, _GROUPED_SAMPLES // global_batch)) if singly else most
        if (ends := self._reading.ordering.ends(self._reading.seed, epoch)) is not None:
            unread = uneven_steps(order, first_step, ends, world)
        else:
            unread = group_steps(order, first_step, most, global_batch, world, drop_last=drop_last)
        for block in unread:
            if not singly:
                yield block, (block,)
                continue
            for step in block.steps_of_indices():
                yield step, tuple(micro_steps(step, cut, world)) if self._in_parts else (step,)

    def evaluation(self, batch_size: int) -> Iterator[Batch]:
        """Yield this rank's share of all samples once, as batches of inputs and targets."""
        if self._reading.slots is not None:
            yield from self._in_columns(batch_size, self._reading.slots)
            return
        every, world, whole = self._all, self._world, self._reading.loss_batch
        # What is shared out: samples, or batches of them that stay whole.
        units = range(len(every) if whole is None else -(-len(every) // whole))
        batches = [
            (part, span[k : k + batch_size], k + batch_size >= len(span))
            for part in held_parts(world)
            for span in _spans(every, part_of(units, part, world), whole)
            for k in range(0, len(span), batch_size)
        ]
        read = self._read_in_turn([batch for _, batch, _ in batches])
        for (part, batch, closes), (inputs, targets) in zip(batches, read, strict=True):
            pair, count = self._finish(inputs, targets, len(batch)), len(batch)
            if whole is None:
                yield Batch(*pair, count, batch.start, part)
            else:
                yield Batch(*pair, count, batch.start, part, batch.start // whole, closes)

    def _in_columns(self, batch_size: int, slots: int) -> Iterator[Batch]:
        """Yield this rank's share of the slots, each with its samples one after the other."""
        every, world = self._all, self._world
        slots = min(slots, len(every))
        columns = [share(every, slot, slots) for slot in range(slots)]
        # A loss over the whole batch needs all slots at once.
        together = self._reading.loss_batch is not None
        groups = [
            (part, columns if together else columns[k : min(k + batch_size, mine.stop)])
            for part in held_parts(world)
            for mine in [part_of(range(slots), part, world)]
            for k in (range(part == 0) if together else mine[::batch_size])
        ]
        batches = [
            (part, number, [column[row] for column in group if row < len(column)])
            for number, (part, group) in enumerate(groups)
            for row in range(len(group[0]))
        ]
        read = self._read_in_turn([batch for _, _, batch in batches])
        for (part, number, batch), (inputs, targets) in zip(batches, read, strict=True):
            pair, count = self._finish(inputs, targets, len(batch)), len(batch)
            yield Batch(*pair, count, batch[0], part, number, places=batch)

    def peek(self, samples: int) -> Batch:
        """Return the first samples, as an evaluation reads them."""
        first = self._all[:samples]
        ((inputs, targets),) = self._read_in_turn([first])
        part = held_parts(self._world).start
        return Batch(*self._finish(inputs, targets, len(first)), len(first), part=part)

    def trained(self, samples: Sequence[int]) -> Batch:
        """Return these samples as the first epoch trains on them, but for `batch_transform`."""
        ((inputs, targets),) = self._read_in_turn([samples])
        inputs = self._augmented(inputs, len(samples), 0, torch.tensor(samples))
        return Batch(*self._finish(inputs, targets, len(samples)), len(samples))

    def _keys(self, epoch: int, indices: Tensor) -> Tensor:
        """Return the keys of samples in an epoch, for the augmentation.

        Virtual ranks look them up: each asks by itself, for few.
        """
        if not self._world.virtual_ranks or len(self._all) >= LAZY_FROM:
            return super()._keys(epoch, indices)
        if self._table is None or self._table[0] != epoch:
            every = torch.arange(len(self._all), device=indices.device)
            self._table = epoch, super()._keys(epoch, every)
        return self._table[1][indices]

    @abstractmethod
    def _read_in_turn(self, batches: Sequence[Sequence[int]]) -> Iterator[tuple[Any, Any]]:
        """Yield the stored inputs and the targets of some samples, on the device."""


def _spans(samples: range, units: range, whole: int | None) -> list[range]:
    """Return the samples of some units: these themselves, or batches of `whole` samples."""
    if whole is None:
        return [samples[units.start : units.stop]]
    return [samples[unit * whole : (unit + 1) * whole] for unit in units]
