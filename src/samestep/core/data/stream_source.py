"""A stream as a source of batches: read from its beginning on, its end agreed by all ranks."""

import weakref
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from itertools import count, tee
from typing import Any

import torch
import torch.utils.data
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from samestep.base.errors import UserError, no_exit
from samestep.core.data.collating import Collating, name_of
from samestep.core.data.keyed_random import mix, seed_reading
from samestep.core.data.loader_source import blame_worker, ignore_stop_signals, starting_workers
from samestep.core.data.order import Block, Cut, Read, share
from samestep.core.data.prefetch import Pair, on_device
from samestep.core.data.source import Batch, ReadOptions, Source
from samestep.core.data.stream_lanes import (
    EACH_ALL,
    Lane,
    Mark,
    Route,
    check_same,
    leads_back,
    num_lanes,
    num_shards,
)


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """One rank's facts about a global batch, without its samples."""

    slots: list[int] = field(default_factory=list)
    """Of its own samples."""
    rows: list[int] = field(default_factory=list)
    """Of each of its micro-steps."""
    seen: int = 0
    """Elements of its lanes, those of other ranks included."""
    marks: dict[int, Mark] = field(default_factory=dict)
    """Lane → where reading can start for the next global batch."""
    failed: str = ""
    """What went wrong, for the user; the last that comes."""


Item = tuple[list[Pair], BatchFacts]
"""The micro-steps of a rank in a global batch, collated, and what is known of them."""


class StreamBatches(IterableDataset[Item]):
    """A rank's part of each global batch of a stream, in order.

    Each of n workers reads all lanes of the rank and collates every n-th batch; the loader takes
    them from its workers in turn.
    """

    def __init__(self, stream: Any, route: Route, collate: Collating, cut: Cut | None) -> None:
        self._stream, self._route, self._collate, self._cut = stream, route, collate, cut

    def __iter__(self) -> Iterator[Item]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        # Streams that see it leave to other workers what they are meant to give to this one.
        torch.utils.data._utils.worker._worker_info = None  # noqa: SLF001
        try:
            with no_exit():
                yield from self._read(worker, workers)
        except UserError as error:
            yield [], BatchFacts(failed=str(error))

    def _read(self, worker: int, workers: int) -> Iterator[Item]:
        route = self._route
        lanes = [(route.slots(n), n, Lane(self._stream, route, n)) for n in route.lanes_of_rank()]
        number = 0
        while True:
            slots: list[int] = []
            mine: list[Any] = []
            read = 0
            for owned, _, lane in lanes:
                taken = lane.take(len(owned))
                read += len(taken)
                for slot, element in zip(owned, taken, strict=False):
                    if slot in route.mine:
                        slots.append(slot)
                        mine.append(element)
            if read == 0:
                return
            if number % workers == worker:
                facts = BatchFacts(slots, seen=read, marks={n: lane.mark() for _, n, lane in lanes})
                yield self._collated(mine, facts, route.first_step + number)
            number += 1

    def _collated(self, elements: list[Any], facts: BatchFacts, step: int) -> Item:
        count, route = len(elements), self._route
        whole = [(0, count, count)] if count else []
        cuts = self._cut(count, count) if self._cut is not None and count else whole
        pairs = []
        for start, rows, _ in cuts:
            # What is drawn here must not depend on what has been read ahead.
            seed_reading(mix(route.seed, route.epoch, step, facts.slots[start]))
            pairs.append(self._collate(elements[start : start + rows]))
        return pairs, replace(facts, rows=[rows for _, rows, _ in cuts])


_KEPT = 8
"""Places to start from that are remembered: more than batches are read ahead."""
_NOTHING: Item = ([], BatchFacts())
_PATIENCE_S = 10.0
"""A thread or a killed process has ended long before."""


class StreamSource(Source):
    """A stream, of which every rank reads the lanes of its slots.

    The ranks agree on each global batch before the one before it is trained: on its size, on the
    end, and on what failed on any of them.
    """

    num_samples = 0

    def __init__(self, stream: Any, reading: ReadOptions, num_workers: int) -> None:
        super().__init__(reading)
        if hasattr(stream, "__next__") and not isinstance(stream, IterableDataset):
            raise UserError(
                f"The recipe's data is a {type(stream).__name__}, which can be read only once. Use "
                "an object whose __iter__ starts over: an IterableDataset."
            )
        self._stream = stream
        self.num_shards = num_shards(stream)
        self._num_workers = num_workers
        self._collate = Collating(stream, reading.collate, whole=reading.whole)
        self._collates = reading.collate is not None
        self.goes_back = False
        """Whether its state leads back to where it was; else elements are skipped one by one."""
        self._marks: dict[tuple[int, int], dict[int, Mark]] = {}
        self._iterators: list[Any] = []
        weakref.finalize(self, _end, self._iterators)

    def close(self) -> None:
        """End the workers."""
        _end(self._iterators)

    def agree(self) -> None:
        """Check that all ranks read the same stream, and whether its state can be gone back to."""
        route = self._route(self.num_shards, 0)
        check_same(self._stream, route, self._world)
        self.goes_back = self._world.on_main(lambda: leads_back(self._stream, route))

    @property
    def loses_its_place(self) -> bool:
        """Whether the stream has a state that does not lead back."""
        return callable(getattr(self._stream, "state_dict", None)) and not self.goes_back

    def order_record(self) -> dict[str, Any]:
        """Return the entries on the order, beyond seed and sizes."""
        return {"shuffle_buffer": self._reading.shuffle_buffer, "num_shards": self.num_shards}

    def marks_at(self, epoch: int, step: int) -> dict[int, Mark]:
        """Return this rank's positions to read from after `step` steps of an epoch."""
        return self._marks.get((epoch, step), {})

    def start_from(self, epoch: int, step: int, marks: dict[int, Mark]) -> None:
        """Let reading start at these marks once these steps of that epoch are taken."""
        self._marks = {(epoch, step): marks}

    def _unread(
        self, epoch: int, first_step: int, global_batch: int, cut: Cut | None, *, drop_last: bool
    ) -> Generator[tuple[Block, list[Block]]]:
        route = replace(
            self._route(global_batch, epoch),
            first_step=first_step,
            marks=self._marks.get((epoch, first_step), {}),
        )
        route = replace(route, window=-(-self._reading.shuffle_buffer // route.lanes))
        items = self._items(route, cut if self._collates else None)
        try:
            yield from self._agreed(items, route, drop_last=drop_last)
        finally:
            items.close()

    def _route(self, global_batch: int, epoch: int) -> Route:
        world = self._world
        return Route(
            seed=self._reading.seed,
            epoch=epoch,
            global_batch=global_batch,
            lanes=num_lanes(self.num_shards, global_batch),
            states=self.goes_back,
            mine=share(range(global_batch), world.rank, world.world_size),
        )

    def _items(self, route: Route, cut: Cut | None = None) -> Generator[Item]:
        """Yield this rank's part of each global batch; what fails is the last of them."""
        batches = StreamBatches(self._stream, route, self._collate, cut)
        if not self._num_workers:
            yield from batches
            return
        loader: DataLoader[Item] = DataLoader(
            batches,
            batch_size=None,
            collate_fn=_as_it_is,  # type: ignore[arg-type]
            num_workers=self._num_workers,
            pin_memory=self._world.device.type == "cuda",
            worker_init_fn=ignore_stop_signals,
        )
        with starting_workers():
            iterator = iter(loader)
        self._iterators.append(iterator)
        try:
            yield from iterator
        except Exception as error:  # what the stream raises comes as an item
            blame_worker(iterator, name_of(self._stream), error)
            raise
        finally:
            _end(self._iterators)

    def _agreed(
        self, items: Iterator[Item], route: Route, *, drop_last: bool
    ) -> Iterator[tuple[Block, list[Block]]]:
        """Yield each step's block, and its micro-steps, whose `targets` are pairs to be sent.

        Of each global batch the next one is known before, so that the last says that it is.
        """
        held: tuple[Block, list[Block]] | None = None
        # Lanes that had ended before a resume are in no batch.
        marks = {n: route.marks[n] for n in route.lanes_of_rank() if n in route.marks}
        stand_in: Item = _NOTHING
        for step in count(route.first_step):
            item = next(items, _NOTHING)
            stand_in = item if item[0] else stand_in
            sizes, lacks, problem = self._agree(
                item[1], step, whole=route.lanes == 1, lacks=not stand_in[0]
            )
            size = sum(sizes)
            ends = size == 0 or (drop_last and size < route.global_batch)
            if held is not None:
                last = ends and not problem
                yield replace(held[0], last=last), [replace(part, last=last) for part in held[1]]
            elif not problem and ends and step == 0:
                problem = self._too_short(size, route)
            if problem:
                raise UserError(problem, on_all_ranks=True)
            if ends:
                return
            marks = item[1].marks or marks
            self._marks[route.epoch, step + 1] = marks
            while len(self._marks) > _KEPT:
                del self._marks[next(iter(self._marks))]
            if lacks:
                stand_in = self._part_of_batch(stand_in, sizes)
            pairs, facts = stand_in
            # What an augmentation is drawn by; what does not count only stands in.
            places = torch.tensor(facts.slots) + step * route.global_batch
            weight, cut = 1.0 if item[0] else 0.0, torch.split(places, facts.rows)
            held = (
                Block(step, 1, places, None, len(places), weight, size),
                [
                    Block(step, 1, own, pair, len(own), weight, size)
                    for own, pair in zip(cut, pairs, strict=True)
                ],
            )

    def _agree(
        self, facts: BatchFacts, step: int, *, whole: bool, lacks: bool
    ) -> tuple[list[int], bool, str]:
        """Agree on a global batch: the samples of each rank, and what is wrong on any of them.

        `whole`: whether every rank reads all of the stream. `lacks`: whether this rank has nothing
        that can stand in for an empty part; returned is whether any lacks it.
        """
        world = self._world
        table = torch.zeros(world.world_size, 4, dtype=torch.int64)
        table[world.rank] = torch.tensor([len(facts.slots), facts.seen, bool(facts.failed), lacks])
        sizes, seen, failed, lack = world.reduce(table).T.tolist()
        problem = ""
        if any(failed):
            problem = next(text for text in world.gather(facts.failed) if text)
        elif whole and len(set(seen)) > 1:
            problem = (
                f"{name_of(self._stream)} has different lengths on the ranks: of global batch "
                f"{step} they read {seen} elements. {EACH_ALL}"
            )
        return sizes, any(lack), problem

    def _part_of_batch(self, own: Item, sizes: list[int]) -> Item:
        """Return a rank's part of a global batch that has one, where this rank never had any."""
        world = self._world
        giver = next(rank for rank, size in enumerate(sizes) if size)
        pairs, facts = own
        offer = (pairs, facts.slots, facts.rows) if world.rank == giver else ([], [], [])
        received, slots, rows = world.gather(offer)[giver]
        return own if pairs else (received, BatchFacts(slots, rows))

    def _too_short(self, size: int, route: Route) -> str:
        name = name_of(self._stream)
        if size:
            return (
                f"--drop-last leaves no step: {name} has {size} elements, fewer than the global "
                f"batch of {route.global_batch}. Use a smaller batch or leave out --drop-last."
            )
        if route.epoch == 0:
            return f"{name} has no elements."
        return (
            f"{name} had no element in epoch {route.epoch + 1}: it seems that it can be read only "
            "once. Let __iter__ start over each time."
        )

    def _read(self, unread: Iterator[Block], epoch: int) -> Read:  # noqa: ARG002
        blocks, again = tee(unread)
        pairs = (block.targets for block in again)
        for block, pair in zip(blocks, self._sent(pairs), strict=True):
            yield replace(block, targets=None), *pair

    def _sent(self, pairs: Iterator[Pair]) -> Iterator[Pair]:
        for inputs, targets in on_device(pairs, self._world.device, self._reading.lap):
            yield inputs, self._cast(targets)

    def evaluation(self, batch_size: int) -> Iterator[Batch]:
        """Yield this rank's share of all elements once, as batches of inputs and targets."""
        if self._reading.loss_batch is not None:
            raise UserError(
                f'{self._reading.data} is a stream, and Recipe(loss_over="batch") is evaluated '
                "over fixed batches: use tensors or a map-style Dataset there."
            )
        route = replace(self._route(batch_size * self._world.world_size, 0), states=False)
        items = self._items(route)
        try:
            numbered, again = tee(_sound(items))
            pairs = self._sent(pairs[0] for _, pairs, _ in again)
            for (number, _, facts), pair in zip(numbered, pairs, strict=True):
                rows, first = len(facts.slots), number * route.global_batch + facts.slots[0]
                yield Batch(*self._finish(*pair, rows), rows, first)
        finally:
            items.close()

    def peek(self, samples: int) -> Batch:
        """Return the first samples that this rank finds, as an evaluation reads them."""
        elements = self.first_elements(samples)
        if not elements:
            raise UserError(f"{name_of(self._stream)} has no elements.")
        (pair,) = self._sent(iter([self._collate(elements)]))
        return Batch(*self._finish(*pair, len(elements)), len(elements))

    def first_elements(self, limit: int) -> list[Any]:
        """Return the first elements of the first shard that has any, from this rank's on."""
        route = self._route(self.num_shards, 0)
        first = route.lanes * self._world.rank // self._world.world_size
        elements = (
            Lane(self._stream, route, (first + place) % route.lanes).take(limit)
            for place in range(route.lanes)
        )
        return next(filter(None, elements), [])


def _as_it_is(item: Item) -> Item:
    return item


def _sound(items: Iterator[Item]) -> Iterator[tuple[int, list[Pair], BatchFacts]]:
    """Number the batches of a rank, and yield those that are not empty."""
    for number, (pairs, facts) in enumerate(items):
        if facts.failed:
            raise UserError(facts.failed)
        if pairs:
            yield number, pairs, facts


def _end(iterators: list[Any]) -> None:
    """End the workers of some iterators at once.

    PyTorch asks them by SIGTERM, which they ignore, and waits for those that wait for an element.
    """
    while iterators:
        iterator: Any = iterators.pop()
        if not iterator._shutdown:  # noqa: SLF001
            iterator._shutdown = True  # noqa: SLF001
            _let_go(iterator)
        for worker in iterator._workers:  # noqa: SLF001
            if worker.is_alive():
                worker.kill()
                worker.join(_PATIENCE_S)


def _let_go(iterator: Any) -> None:
    """End what PyTorch has in this process for an iterator's workers, as long as they live."""
    iterator._workers_done_event.set()  # noqa: SLF001
    results = iterator._worker_result_queue  # noqa: SLF001
    if hasattr(iterator, "_pin_memory_thread"):  # it would wait for what a dead one half wrote
        iterator._pin_memory_thread_done_event.set()  # noqa: SLF001
        results.put((None, None))
        iterator._pin_memory_thread.join(_PATIENCE_S)  # noqa: SLF001
    signals: Any = torch.utils.data._utils.signal_handling  # noqa: SLF001
    signals._remove_worker_pids(id(iterator))  # noqa: SLF001 - their death would be a failure
    iterator._worker_pids_set = False  # noqa: SLF001
    for queue in (*iterator._index_queues, results):  # noqa: SLF001
        queue.cancel_join_thread()
        queue.close()
