"""Which elements of a stream make up each global batch, on whichever rank, from whichever place."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch.utils.data import IterableDataset

from samestep.data.batches import open_source
from samestep.data.collating import Collating
from samestep.data.order import share
from samestep.data.stream_batches import StreamBatches
from samestep.data.stream_checks import leads_back
from samestep.data.stream_lanes import Lane, Route, is_stream, num_shards
from samestep.errors import UserError
from samestep.ranks.world import World


class Numbers(IterableDataset):
    """Places as samples (place, a number drawn), in shards; it notes what has been read."""

    def __init__(self, parts, read=None):
        self.parts, self.read = parts, [] if read is None else read

    @property
    def num_shards(self):
        return len(self.parts)

    def shard(self, num_shards, index):
        return type(self)(self.parts[index::num_shards], self.read)

    def __iter__(self):
        for place in itertools.chain.from_iterable(self.parts):
            self.read.append(place)
            yield torch.tensor(place), torch.rand(())


class GoesOn(Numbers):
    """Numbers that go on from a state."""

    at = 0

    def __iter__(self):
        for place in list(itertools.chain.from_iterable(self.parts))[self.at :]:
            self.at += 1
            yield torch.tensor(place), torch.rand(())

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Lags(GoesOn):
    """A state that is behind by one element: it would be read twice."""

    def __iter__(self):
        for element in Numbers.__iter__(self):
            yield element
            self.at += 1


def numbers(elements, shards=1, kind=Numbers):
    return kind([list(range(elements))[shard::shards] for shard in range(shards)])


def route(stream, global_batch, rank=0, world_size=1, **how):
    lanes = min(num_shards(stream), global_batch)
    mine = share(range(global_batch), rank, world_size)
    return Route(seed=1, epoch=0, global_batch=global_batch, lanes=lanes, mine=mine, **how)


def read(stream, way):
    """Return the rows of each global batch as slot → (place, number drawn), and its marks."""
    batches = []
    for pairs, told in StreamBatches(stream, way, Collating(stream, None, whole=False), None):
        assert not told.failed, told.failed
        rows = list(zip(*[p.tolist() for p in pairs[0]], strict=True)) if pairs else []
        batches.append((dict(zip(told.slots, rows, strict=True)), told.marks))
    return batches


def test_element_i_belongs_to_global_batch_i_by_b():
    batches = read(numbers(30), route(numbers(30), 12))
    places = [[place for place, _ in rows.values()] for rows, _ in batches]
    assert places == [list(range(12)), list(range(12, 24)), list(range(24, 30))]


@pytest.mark.parametrize(("shards", "window"), [(1, 0), (1, 10), (5, 0), (5, 4), (40, 3)])
def test_ranks_together_read_what_one_reads_alone(shards, window):
    stream = numbers(131, shards)
    alone = [rows for rows, _ in read(stream, route(stream, 12, window=window))]
    assert sorted(place for rows in alone for place, _ in rows.values()) == list(range(131))
    for world_size in (2, 3, 5):
        parts = [
            [rows for rows, _ in read(stream, route(stream, 12, r, world_size, window=window))]
            for r in range(world_size)
        ]
        together = [
            {slot: row for rows in own if rows for slot, row in rows.items()}
            for own in itertools.zip_longest(*parts)
        ]
        assert together == alone


@pytest.mark.parametrize(("shards", "window"), [(1, 0), (1, 10), (5, 0), (5, 4)])
@pytest.mark.parametrize("kind", [Numbers, GoesOn])
def test_reading_goes_on_from_the_marks_of_any_batch(shards, window, kind):
    stream = numbers(100, shards, kind)
    states = leads_back(stream, route(stream, shards))
    assert states == (kind is GoesOn)
    way = route(stream, 12, window=window, states=states)
    batches = read(stream, way)
    for step in range(1, len(batches)):
        later = replace(way, first_step=step, marks=batches[step - 1][1])
        again = read(numbers(100, shards, kind), later)
        assert [rows for rows, _ in again] == [rows for rows, _ in batches[step:]]


def test_a_stream_with_a_state_does_not_give_again_what_was_read():
    lane = Lane(numbers(100, kind=GoesOn), route(numbers(1), 10, states=True), 0)
    lane.take(70)
    stream = numbers(100, kind=GoesOn)
    later = route(stream, 10, states=True, first_step=7, marks={0: lane.mark()})
    given = [int(place) for place, _ in Lane(stream, later, 0).take(30)]
    assert given == list(range(70, 100))


def test_a_buffer_shuffles_by_seed_and_epoch():
    stream = numbers(60)
    way = route(stream, 10, window=20)
    orders = [
        [int(place) for place, _ in Lane(stream, replace(way, **change), 0).take(60)]
        for change in ({}, {}, {"seed": 2}, {"epoch": 1})
    ]
    assert orders[0] == orders[1]
    assert all(orders[0] != other for other in (*orders[2:], list(range(60))))
    assert sorted(orders[0][:20]) == list(range(20))


def test_a_state_that_does_not_lead_back_is_not_used():
    assert not leads_back(numbers(30, kind=Lags), route(numbers(1), 1))


def test_a_shuffle_buffer_of_hugging_face_is_read_again_and_not_gone_back_to():
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_dict({"place": list(range(50))}).to_iterable_dataset()
    assert is_stream(stream)
    assert leads_back(stream, route(numbers(1), 1))
    assert not leads_back(stream.shuffle(seed=1, buffer_size=10), route(numbers(1), 1))


def opened(stream, **how):
    return open_source(
        stream, World(), seed=1, dtype=torch.float64, num_workers=how.pop("num_workers", 0), **how
    )


def steps(source, epoch=0, first_step=0, *, drop_last=False):
    return list(source.blocks(epoch, first_step, global_batch=12, drop_last=drop_last))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_last_block_says_so_and_each_element_is_evaluated_once(num_workers):
    source = opened(numbers(131), num_workers=num_workers)
    blocks = steps(source)
    assert [block.last for block in blocks] == [False] * 10 + [True]
    assert [block.global_size for block in blocks] == [12] * 10 + [11]
    assert [block.last for block in steps(source, drop_last=True)] == [False] * 9 + [True]
    assert steps(source, first_step=11) == []
    batches = list(source.evaluation(20))
    assert torch.cat([batch.inputs for batch in batches]).tolist() == list(range(131))
    assert [batch.samples for batch in batches] == [20] * 6 + [11]
    source.close()


class Once(Numbers):
    """It gives its elements a single time."""

    def __init__(self, elements):
        self.elements = iter([(torch.tensor(n), torch.tensor(n)) for n in range(elements)])

    num_shards = 1

    def __iter__(self):
        return self.elements


def test_what_cannot_be_read_is_told():
    with pytest.raises(UserError, match="only once"):
        opened(n for n in range(3))
    with pytest.raises(UserError, match="no elements"):
        steps(opened(numbers(0)))
    with pytest.raises(UserError, match="--drop-last"):
        steps(opened(numbers(11)), drop_last=True)
    once = opened(Once(20))
    assert len(steps(once)) == 2
    with pytest.raises(UserError, match="epoch 2"):
        steps(once, epoch=1)
    shrunk = opened(numbers(20))
    shrunk.start_from(0, 3, {0: (36, None)})
    with pytest.raises(UserError, match="20 elements"):
        steps(shrunk, first_step=3)
