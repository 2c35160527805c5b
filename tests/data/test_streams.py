"""Which elements of a stream make up each global batch, on whichever rank, from whichever place."""

import itertools
import signal
import threading
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from samestep.base.errors import UserError
from samestep.core.data.collating import Collating
from samestep.core.data.order import share
from samestep.core.data.recipe_data import is_stream, open_source
from samestep.core.data.stream_lanes import Lane, Route, leads_back, mark_of, num_lanes, num_shards
from samestep.core.data.stream_source import StreamBatches
from samestep.core.session.build import _try_out
from samestep.launch.ranks.world import World


class Numbers(IterableDataset):  # places as samples (place, a number drawn), in shards
    def __init__(self, parts):
        self.parts = parts

    @property
    def num_shards(self):
        return len(self.parts)

    def shard(self, num_shards, index):
        return type(self)(self.parts[index::num_shards])

    def __iter__(self):
        for place in itertools.chain.from_iterable(self.parts):
            yield torch.tensor(place), torch.rand(())


class GoesOn(Numbers):  # numbers that go on from a state
    at = 0

    def __iter__(self):
        for place in list(itertools.chain.from_iterable(self.parts))[self.at :]:
            self.at += 1
            yield torch.tensor(place), torch.rand(())

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Lags(GoesOn):  # a state that is behind by one element: it would be read twice
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


@pytest.mark.parametrize(("shards", "window"), [(1, 0), (1, 10), (5, 0), (5, 4), (40, 3)])
def test_ranks_together_read_what_one_reads_alone(shards, window):
    stream = numbers(131, shards)
    alone = [rows for rows, _ in read(stream, route(stream, 12, window=window))]
    places = [[place for place, _ in rows.values()] for rows in alone]
    assert sorted(itertools.chain(*places)) == list(range(131))
    if (shards, window) == (1, 0):  # element i belongs to global batch i // 12
        assert places == [list(range(131))[first : first + 12] for first in range(0, 131, 12)]
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


def test_a_buffer_shuffles_by_seed_and_epoch_and_a_stream_that_differs_is_refused():
    stream = numbers(60)
    way = route(stream, 10, window=20)
    orders = [
        [int(place) for place, _ in Lane(stream, replace(way, **change), 0).take(60)]
        for change in ({}, {}, {"seed": 2}, {"epoch": 1})
    ]
    assert orders[0] == orders[1]
    assert all(orders[0] != other for other in (*orders[2:], list(range(60))))
    assert sorted(orders[0][:20]) == list(range(20))
    for stream in (Differs([[]]), Once(20)):
        with pytest.raises(UserError, match="read again"):
            opened(stream).agree()
    parts = (opened(numbers(5)), Differs([[]]), opened, World())
    with pytest.raises(UserError, match="read again"):
        _try_out(lambda _source: {}, *parts)


def opened(stream, **how):
    how = {"num_workers": 0, "world": World(), **how}
    return open_source(stream, seed=1, dtype=torch.float64, **how)


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


class Once(Numbers):  # it gives its elements a single time
    def __init__(self, elements):
        self.elements = ((torch.tensor(n), torch.tensor(n)) for n in range(elements))

    num_shards = 1

    def __iter__(self):
        return self.elements


class Deaf(GoesOn):
    """It tells a state that was loaded only once it has given an element, as Hugging Face's do."""

    loaded = None

    def __iter__(self):
        if self.loaded is not None:
            self.at = self.loaded
        yield from super().__iter__()

    def load_state_dict(self, state):
        self.loaded = state["at"]


@pytest.mark.parametrize("kind", [Numbers, GoesOn, Deaf])
def test_a_run_may_be_gone_on_with_twice_within_a_window(kind):
    def given(first_step, marks):
        stream = numbers(100, kind=kind)
        way = route(stream, 5, window=20, states=kind is not Numbers)
        lane = Lane(stream, replace(way, first_step=first_step, marks=marks), 0)
        return [int(place) for place, _ in lane.take(5)], {0: lane.mark()}

    marks, read = {}, []
    for step in range(20):
        elements, marks = given(step, marks)
        read += elements
    assert sorted(read) == list(range(100))


class BeginsAgain(GoesOn):  # its state is that of its beginning once it has ended
    def __iter__(self):
        yield from super().__iter__()
        self.at = 0


@pytest.mark.parametrize("window", [0, 10])
def test_a_lane_that_has_ended_is_not_read_again(window):
    stream = numbers(60, 2, BeginsAgain)
    stream.parts[0] = stream.parts[0][:7]
    way = route(stream, 10, window=window, states=True)
    batches = read(stream, way)
    for step in range(1, len(batches)):
        again = read(stream, replace(way, first_step=step, marks=batches[step - 1][1]))
        assert [rows for rows, _ in again] == [rows for rows, _ in batches[step:]]


class Differs(Numbers):  # it gives something else each time
    drawn = itertools.count()

    def __iter__(self):
        yield torch.tensor(next(self.drawn)), torch.zeros(())


def test_a_state_is_used_if_it_leads_back_in_the_first_shard_that_is_long_enough():
    stream = GoesOn([[], [0], [1, 2, 3]])
    assert leads_back(stream, route(stream, 3))
    assert not leads_back(numbers(30, kind=Lags), route(numbers(1), 1))
    asks = type("Asks", (GoesOn,), {"state_dict": lambda _stream, at: {"at": at}})
    assert not leads_back(numbers(30, kind=asks), route(numbers(1), 1))
    held = {"state_dict": lambda stream: defaultdict(int, at=stream.at)}  # no checkpoint loads it
    assert not leads_back(numbers(30, kind=type("Held", (GoesOn,), held)), route(numbers(1), 1))


def test_streams_of_hugging_face_may_not_divide_themselves_nor_be_gone_back_to_in_a_buffer():
    datasets = pytest.importorskip("datasets")
    from datasets.distributed import split_dataset_by_node

    stream = datasets.Dataset.from_dict({"place": list(range(50))}).to_iterable_dataset(4)
    assert is_stream(stream)
    assert leads_back(stream, route(numbers(1), 1))
    assert not leads_back(stream.shuffle(seed=1, buffer_size=10), route(numbers(1), 1))
    opened(stream).agree()
    with pytest.raises(UserError, match="split_dataset_by_node"):
        opened(split_dataset_by_node(stream, rank=1, world_size=2)).agree()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_collate_draws_depends_on_the_batch_alone(num_workers):
    def drawn(first_step=0, **how):
        source = opened(
            numbers(60),
            collate=lambda rows: (torch.rand(len(rows)), torch.zeros(len(rows))),
            shuffle_buffer=25,
            **how,
        )
        blocks = steps(source, first_step=first_step)
        source.close()
        return [block.parts[0].inputs.tolist() for block in blocks]

    assert drawn(2, num_workers=num_workers) == drawn()[2:]


def test_elements_of_any_kind_are_compared_and_what_cannot_be_read_is_told():
    def elements():
        yield torch.ones(3, dtype=torch.bfloat16)
        yield np.array([{"a": 1}, None, "text"], dtype=object)
        yield torch.eye(3).to_sparse()
        yield torch.eye(3).T[1:, ::2]
        yield object()

    assert list(map(mark_of, elements())) == list(map(mark_of, elements()))
    assert mark_of(torch.ones(2)) != mark_of(torch.ones(2, 1))
    assert mark_of(np.array(["a"], dtype=object)) != mark_of(np.array(["b"], dtype=object))
    shrunk, once = opened(numbers(20)), opened(Once(20))
    shrunk.start_from(0, 3, {0: (36, None, False)})
    assert len(steps(once)) == 2
    for told, read_it in {
        "only once": lambda: opened(n for n in range(3)),
        "DataLoader": lambda: opened(torch.utils.data.DataLoader([0, 1])),
        "no elements": lambda: steps(opened(numbers(0))),
        "element 2": lambda: steps(opened(Numbers([[0, 1, "no number"]]))),
        "--drop-last": lambda: steps(opened(numbers(11)), drop_last=True),
        "epoch 2": lambda: steps(once, epoch=1),
        "20 elements": lambda: steps(shrunk, first_step=3),
    }.items():
        with pytest.raises(UserError, match=told):
            read_it()


def test_lanes_and_their_windows_are_bounded_and_marks_of_ended_ones_are_kept():
    assert [num_lanes(1000, 2000), num_lanes(1000, 12), num_lanes(3, 12)] == [256, 12, 3]
    blocks = opened(numbers(700, 300), shuffle_buffer=1000).blocks(
        0, 0, global_batch=500, drop_last=False
    )
    assert sum(block.rows for block in blocks) == 700
    stream = numbers(24)
    source = opened(stream)
    list(source.blocks(0, 0, global_batch=12, drop_last=False))
    source.start_from(0, 2, {0: (24, None, True)})
    assert list(source.blocks(0, 2, global_batch=12, drop_last=False)) == []
    assert source.marks_at(0, 2) == {0: (24, None, True)}


class Waits(Numbers):  # its element 30 never comes
    def __iter__(self):
        for element in super().__iter__():
            if int(element[0]) == 30:
                threading.Event().wait()
            yield element


def test_a_worker_that_is_killed_is_no_mistake_of_the_streams_and_one_that_waits_is_ended():
    source = opened(numbers(60, kind=Waits), num_workers=2)
    blocks = source.blocks(0, 0, global_batch=12, drop_last=False)
    assert next(blocks).first_step == 0
    workers = list(source._iterators[0]._workers)
    workers[0].kill()
    with pytest.raises(RuntimeError, match=r"(?i)killed.*--num-workers|exited.*--num-workers"):
        list(blocks)
    source.close()
    assert {worker.exitcode for worker in workers} == {-signal.SIGKILL}
