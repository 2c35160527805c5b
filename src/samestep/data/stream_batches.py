"""One rank's part of the global batches of a stream, read and collated: here or in a worker."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch.utils.data
from torch.utils.data import IterableDataset, get_worker_info

from samestep.data.blocks import Cut
from samestep.data.collating import Collating
from samestep.data.keyed_random import mix
from samestep.data.loader_source import seed_reading
from samestep.data.prefetch import Pair
from samestep.data.stream_lanes import Lane, Mark, Route
from samestep.errors import UserError, no_exit


@dataclass(frozen=True, slots=True)
class Told:
    """What a rank knows of a global batch, beside its samples."""

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


Item = tuple[list[Pair], Told]
"""The micro-steps of a rank in a global batch, collated, and what is known of them."""


class StreamBatches(IterableDataset[Item]):
    """A rank's part of each global batch of a stream, in order.

    Each worker reads all lanes of the rank, and collates every so many-th batch: a loader takes
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
            yield [], Told(failed=str(error))

    def _read(self, worker: int, workers: int) -> Iterator[Item]:
        route = self._route
        lanes = [(route.slots(n), n, Lane(self._stream, route, n)) for n in route.own_lanes()]
        number = 0
        while True:
            slots: list[int] = []
            mine: list[Any] = []
            seen = 0
            for owned, _, lane in lanes:
                taken = lane.take(len(owned))
                seen += len(taken)
                for slot, element in zip(owned, taken, strict=False):
                    if slot in route.mine:
                        slots.append(slot)
                        mine.append(element)
            if seen == 0:
                return
            if number % workers == worker:
                told = Told(slots, seen=seen, marks={n: lane.mark() for _, n, lane in lanes})
                yield self._collated(mine, told, route.first_step + number)
            number += 1

    def _collated(self, elements: list[Any], told: Told, step: int) -> Item:
        count, route = len(elements), self._route
        whole = [(0, count, count)] if count else []
        cuts = self._cut(count, count) if self._cut is not None and count else whole
        pairs = []
        for start, rows, _ in cuts:
            # What is drawn here must not depend on what has been read ahead.
            seed_reading(mix(route.seed, route.epoch, step, told.slots[start]))
            pairs.append(self._collate(elements[start : start + rows]))
        return pairs, replace(told, rows=[rows for _, rows, _ in cuts])
