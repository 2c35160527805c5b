"""The order of a stream's elements: lanes, windows, and places where reading can start again.

A stream without shards is one lane. One with S shards, in global batches of B, is min(S, B, 256)
lanes, each of some shards, one behind the other. Slot j of a global batch is filled by lane
⌊j · lanes / B⌋, so the order does not depend on the number of ranks.
"""

import contextlib
import copy
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samestep.base.errors import UserError, blame
from samestep.base.run.checkpoints import is_plain
from samestep.base.trees import tree_leaves
from samestep.core.data.collating import name_of
from samestep.core.data.keyed_random import mix, mix_next, seed_reading
from samestep.launch.ranks.world import World

Mark = tuple[int, Any, bool]
"""A place to start from in a lane: the elements before it, the stream's state there, if it has one,
and whether the lane has ended."""
_MOST_LANES = 256
"""A process that reads all of them has a file of each open, or more."""
_SHARED_BYTES = 2**20
"""Arrays of a stream from this size on are not copied."""
_DROPPED = 256
"""Elements that are skipped at once."""


def num_shards(stream: Any) -> int:
    """Return the number of a stream's shards; 1 if it cannot be divided by them."""
    number = getattr(stream, "num_shards", None) or getattr(stream, "n_shards", None)
    return number if isinstance(number, int) and callable(getattr(stream, "shard", None)) else 1


def num_lanes(shards: int, global_batch: int) -> int:
    """Return the number of lanes for a stream's number of shards."""
    return min(shards, global_batch, _MOST_LANES)


@dataclass(frozen=True, kw_only=True)
class Route:
    """What of a stream one rank reads, and from where on."""

    seed: int
    epoch: int
    first_step: int = 0
    """Global batches of the epoch that are left out."""
    global_batch: int
    lanes: int
    mine: range
    """This rank's slots of a global batch."""
    window: int = 0
    """Elements of a lane that are shuffled together; 0 keeps them as they come."""
    marks: dict[int, Mark] = field(default_factory=dict)
    """Lane → where its reading can start."""
    states: bool = False
    """Whether marks hold the stream's state; else its elements are skipped."""

    def slots(self, lane: int) -> range:
        """Return the slots of a global batch that a lane fills."""
        start, stop = (-(-place * self.global_batch // self.lanes) for place in (lane, lane + 1))
        return range(start, stop)

    def lanes_of_rank(self) -> range:
        """Return the lanes that fill slots of this rank."""
        if not len(self.mine):
            return range(0)
        first, last = (
            slot * self.lanes // self.global_batch for slot in (self.mine[0], self.mine[-1])
        )
        return range(first, last + 1)


class Lane:
    """One lane of a stream, read from a place on.

    What an element draws is seeded by (seed, epoch, lane, place), whichever rank reads it.
    """

    def __init__(self, stream: Any, route: Route, number: int) -> None:
        self._route, self._key = route, mix(route.seed, route.epoch, number)
        self._name = name_of(stream)
        self._lane = f" of lane {number} of {route.lanes}" if route.lanes > 1 else ""
        self._mark: Mark = route.marks.get(number, (0, None, False))
        start, state, self._ended = self._mark
        self._at = 0
        """Elements read so far."""
        self._window: list[Any] = []
        self._next = 0
        if self._ended:  # a stream may begin anew where it has ended
            self._at = start
            return
        self._stream = self._opened(stream, number)
        if state is not None and route.states:
            self._at = start
            self._try(self._stream.load_state_dict, state)
        else:
            self._mark = 0, None, False
        self._iterator: Iterator[Any] = self._try(iter, self._stream)
        while self._at < start:
            if not self._read_into([]):
                raise UserError(
                    f"{self._name} ended after {self._at:,} elements{self._lane}; {start:,} had "
                    "been read at the checkpoint. Use the same data as before, or start a new run."
                )
        left = route.first_step * len(route.slots(number)) - start
        while left > 0 and (dropped := len(self.take(min(left, _DROPPED)))):
            left -= dropped

    def take(self, count: int) -> list[Any]:
        """Return the next `count` elements, fewer at the end of the lane."""
        taken: list[Any] = []
        while len(taken) < count:
            if self._next == len(self._window) and not self._fill():
                break
            more = self._window[self._next : self._next + count - len(taken)]
            self._next += len(more)
            taken += more
        return taken

    def mark(self) -> Mark:
        """Return the position to read from for the elements not yet taken."""
        if self._next == len(self._window):
            self._mark = self._position()
        return self._mark

    def _position(self) -> Mark:
        # Some streams report a state that was loaded only after their next element.
        if self._at == self._mark[0]:
            return *self._mark[:2], self._ended
        return self._at, self._state(), self._ended

    def _opened(self, stream: Any, number: int) -> Any:
        """Return a copy of the stream to iterate over: the original stays as it was made."""
        if (lanes := self._route.lanes) > 1:
            stream = self._try(lambda: stream.shard(num_shards=lanes, index=number))
        with contextlib.suppress(Exception):  # what cannot be copied is read itself
            stream = copy.copy(stream)
            # What it counts may be in parts that another copy reads, too.
            parts = vars(stream).values()
            large = {id(p): p for p in parts if getattr(p, "nbytes", 0) >= _SHARED_BYTES}
            stream = copy.deepcopy(stream, large)
        if callable(getattr(stream, "set_epoch", None)):
            self._try(stream.set_epoch, self._route.epoch)
        return stream

    def _fill(self) -> bool:
        """Read the next window; return whether there is one."""
        size = self._route.window
        if size > 1:
            self._mark = self._position()
        key = mix(self._key, self._at)
        window: list[Any] = []
        while len(window) < max(1, size) and self._read_into(window):
            pass
        self._window = window
        self._next = 0
        if size > 1:
            generator = torch.Generator().manual_seed(key)
            order = torch.randperm(len(window), generator=generator).tolist()
            self._window = [window[place] for place in order]
        return bool(window)

    def _read_into(self, window: list[Any]) -> bool:
        if self._ended:
            return False
        seed_reading(mix_next(self._key, self._at))
        try:
            window.append(next(self._iterator))
        except StopIteration:
            self._ended = True
            return False
        except Exception as error:
            self._blame(error)
        self._at += 1
        return True

    def _state(self) -> Any:
        """Return the stream's state where it stands; None if there is none that can be saved."""
        if not self._route.states:
            return None
        state = self._try(self._stream.state_dict)
        return copy.deepcopy(state) if is_plain(state) else None

    def _try(self, function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:
            self._blame(error)

    def _blame(self, error: Exception) -> None:
        blame(f"{self._name} failed at element {self._at:,}{self._lane}, from 0 on", error)


_COMPARED = 8
"""Elements at a stream's beginning by which ranks see that they read the same."""
EACH_ALL = (
    "Each rank needs the same stream: samestep divides it among the ranks. Remove what splits it "
    "by rank (split_by_node, split_dataset_by_node, a nodesplitter) and what draws without a seed."
)


def check_same(stream: Any, route: Route, world: World) -> None:
    """Check that a stream is the same on all ranks and each time it is read.

    Its shards are counted, and the first elements of lane 0 compared: the one lane that all read.
    """
    shards = world.gather(num_shards(stream))
    if len(set(shards)) > 1:
        wrong = f"has another number of shards on each rank: {shards}"
    else:
        own = world.on_every(lambda: _beginning(stream, route))
        if all(other == own for other in world.gather(own)):
            return
        wrong = "starts with different elements on each rank"
    raise UserError(f"{name_of(stream)} {wrong}. {EACH_ALL}", on_all_ranks=True)


def _beginning(stream: Any, route: Route) -> list[str]:
    """Return the marks of the first elements, which are the same when they are read again."""
    if getattr(stream, "_distributed", None) is not None:  # of Hugging Face
        raise UserError(f"{name_of(stream)} was divided by split_dataset_by_node. {EACH_ALL}")
    first, again = (
        list(map(mark_of, Lane(stream, route, 0).take(_COMPARED))) for _time in range(2)
    )
    if first != again:
        raise UserError(
            f"{name_of(stream)} starts with different elements when it is read again. Each epoch, "
            "and a resumed run, restarts it: let __iter__ start over, and seed what it draws; what "
            "depends on the epoch belongs in set_epoch(epoch)."
        )
    return first


def leads_back(stream: Any, route: Route) -> bool:
    """Whether a stream's state after one element leads to the second.

    With a shuffle buffer of its own it would not, nor where the state is behind or ahead.
    """
    if not callable(getattr(stream, "state_dict", None)) or _has_buffer(stream):
        return False
    route = replace(route, states=True)
    for number in range(route.lanes):
        lane = Lane(stream, route, number)
        first = lane.take(1)
        try:
            mark = lane.mark()
        except UserError:  # a state_dict that takes arguments, as that of LitData
            return False
        second = lane.take(1)
        if not first or not second:
            continue  # too short to try it
        if mark[1] is None:
            return False
        again = replace(route, first_step=1, marks={number: mark})
        try:
            resumed = Lane(stream, again, number).take(1)
        except UserError:
            return False
        return list(map(mark_of, resumed)) == list(map(mark_of, second))
    return False


def _has_buffer(stream: Any) -> bool:
    """Whether a stream of Hugging Face has a shuffle buffer, which its state leaves out."""
    inside = [getattr(stream, "_ex_iterable", None)]
    while inside:
        part = inside.pop()
        if "BufferShuffled" in type(part).__name__:
            return True
        inside += [getattr(part, "ex_iterable", None)] if hasattr(part, "ex_iterable") else []
        inside += getattr(part, "ex_iterables", [])
    return False


def mark_of(element: Any) -> str:
    """Return a short text that is equal for equal elements."""
    digest = hashlib.blake2b(digest_size=8)
    for leaf in tree_leaves(element):
        form = type(leaf).__name__
        if isinstance(leaf, Tensor | np.ndarray):
            form += f" {leaf.dtype} {tuple(leaf.shape)}"
        digest.update(form.encode())
        with contextlib.suppress(Exception):  # of some its form has to do, as of sparse tensors
            digest.update(_content(leaf))
    return digest.hexdigest()


def _content(leaf: Any) -> bytes:
    if isinstance(leaf, Tensor):
        return leaf.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(leaf, np.ndarray) and leaf.dtype.hasobject:  # its bytes are addresses
        return mark_of(leaf.tolist()).encode()
    if callable(getattr(leaf, "tobytes", None)):
        return bytes(leaf.tobytes())
    is_plain = leaf is None or isinstance(leaf, bool | int | float | complex | str | bytes)
    return repr(leaf).encode() if is_plain else b""  # other texts may hold an address
