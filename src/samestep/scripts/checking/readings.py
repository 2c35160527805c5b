"""What each rank read from each loader, put together from the events of `watch/data.py`.

Where all ranks have the same data set, an index identifies a sample; elsewhere its content does.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from samestep.scripts.checking import events as ev
from samestep.scripts.checking.seen import RankSeen, Seen

ENOUGH = 8  # samples that tell which they are
_DIFFER = 0.98  # of samples, at least, where their content tells them apart


@dataclass
class Reading:
    """What one rank read from a loader, or from several that look alike."""

    loader: ev.LoaderRead
    orders: list[ev.OrderDrawn] = field(default_factory=list)
    batches: list[ev.BatchRead] = field(default_factory=list)
    left: list[ev.PassEnded] = field(default_factory=list)
    lost: list[ev.SamplesLost] = field(default_factory=list)
    random: dict[int, dict[str, list[int]]] = field(default_factory=dict)
    """What was drawn for the first samples in each worker, -1 being no worker."""
    trains: bool = False

    @property
    def first_pass(self) -> list[ev.BatchRead]:
        """The batches of the first pass, as far as they were read."""
        return [batch for batch in self.batches if not batch.turn]

    @property
    def rows(self) -> list[int]:
        """The samples of the first pass, by their content, as far as they were read."""
        return [row for batch in self.first_pass for row in batch.rows]

    @property
    def order(self) -> list[int]:
        """The samples of the first pass, by their index."""
        return self.orders[0].indices if self.orders else []

    @property
    def has_distinct_rows(self) -> bool:
        """Whether their content tells samples apart."""
        rows = self.rows
        return len(set(rows)) >= max(ENOUGH, _DIFFER * len(rows))

    @property
    def made(self) -> str:
        """Where the loader was made, or else read from."""
        return self.loader.made or self.loader.where

    @property
    def begins_only(self) -> bool:
        """Whether each pass is left after the first of several batches."""
        return len(self.first_pass) == 1 < self.length[0]

    @property
    def length(self) -> tuple[int, bool]:
        """How many batches the first pass has, and whether it has no more."""
        if self.orders:
            return self.orders[0].batches, self.orders[0].ended
        ended = any(not event.turn and not event.cut for event in self.left)
        return len(self.first_pass), ended


def readings_of(rank: RankSeen) -> list[Reading]:
    """Return a rank's readings of its loaders, in order."""
    readings: dict[int, Reading] = {}
    latest: Reading | None = None
    for event in rank.events:
        if isinstance(event, ev.LoaderRead):
            readings[event.loader_id] = Reading(event)
        elif isinstance(event, ev.BackwardPass | ev.OptimizerStep) and latest is not None:
            latest.trains = True
        reading = readings.get(event.loader_id) if isinstance(event, ev.OfLoader) else None
        if reading is None:
            continue
        match event:
            case ev.OrderDrawn():
                reading.orders.append(event)
            case ev.PassEnded():
                reading.left.append(event)
            case ev.SamplesLost():
                reading.lost.append(event)
            case ev.RandomDrawn():
                reading.random.setdefault(event.worker, event.drew)
            case ev.BatchRead():
                before = reading.batches[-1] if reading.batches else event
                reading.trains |= event.turn == before.turn and event.step > before.step
                reading.batches.append(event)
                latest = None if event.evaluating else reading
    return list(readings.values())


def together(seen: Seen, *, trains: bool = True) -> Iterator[list[Reading]]:
    """Yield all ranks' readings at the same line of the script, for training or not."""
    by_place: dict[tuple[str, int], list[Reading]] = defaultdict(list)
    for rank in seen.ranks:
        count: Counter[str] = Counter()
        for reading in readings_of(rank):
            where = reading.loader.where
            if reading.trains == trains and reading.batches:
                by_place[where, count[where]].append(reading)
                count[where] += 1
    yield from (readings for readings in by_place.values() if len(readings) == seen.world_size)


def evaluated(seen: Seen) -> Iterator[list[Reading]]:
    """Yield all ranks' readings in an evaluation, of samples that none of them trains on."""
    trained: dict[int | None, set[int]] = defaultdict(set)
    for reading in (reading for rank in seen.ranks for reading in readings_of(rank)):
        if reading.trains:
            trained[reading.loader.data].update(reading.order)
    for readings in together(seen, trains=False):
        own = {index for reading in readings for index in reading.order}
        data = readings[0].loader.data
        known = bool(own) and bool(trained) and data is not None
        evaluates = all(reading.batches[0].evaluating for reading in readings)
        if known and evaluates and own.isdisjoint(trained[data]):
            yield readings


def same_data(readings: list[Reading]) -> bool:
    """Whether an index means the same sample on all ranks."""
    first = readings[0]
    data = {reading.loader.data for reading in readings}
    if len(data) > 1 or None in data or not all(reading.orders for reading in readings):
        return False
    if any(reading.order != first.order for reading in readings):
        return True
    # With equal indices and no augmentation the samples have to be equal, unless `__getitem__`
    # itself reads another part on each rank.
    drew = any(drawn for reading in readings for drawn in reading.random.values())
    return drew or all(set(reading.rows) & set(first.rows) for reading in readings)


def same_samples(readings: list[Reading]) -> bool:
    """Whether all ranks read the same samples in the first pass."""
    first = readings[0]
    if not same_data(readings):
        return first.has_distinct_rows and all(
            set(reading.rows) == set(first.rows) for reading in readings
        )
    orders = [reading.orders[0] for reading in readings]
    if any(order.truncated for order in orders):
        return all(o.count == first.loader.base_length and o.ended for o in orders)
    return all(sorted(reading.order) == sorted(first.order) for reading in readings)


def shuffled_differently(readings: list[Reading]) -> bool:
    """Whether the ranks' shares are of different orders."""
    if not all(r.orders and r.loader.distributed and r.loader.shuffle for r in readings):
        return False
    return len({(r.orders[0].seed, r.orders[0].set_epoch) for r in readings}) > 1


def equal_in_workers(reading: Reading) -> list[str]:
    """Return the sources from which all workers of a loader drew the same numbers."""
    drawn = [drew for worker, drew in reading.random.items() if worker >= 0]
    if len(drawn) < 2:
        return []
    return [name for name in drawn[0] if all(drew.get(name) == drawn[0][name] for drew in drawn)]


def few(numbers: list[int]) -> str:
    """Return the first of many numbers, as text."""
    return ", ".join(map(str, numbers[:4])) + (", …" if len(numbers) > 4 else "")
