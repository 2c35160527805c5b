"""What is tried with a stream beforehand: do ranks read the same, does its state lead back?"""

import hashlib
from dataclasses import replace
from typing import Any

from torch import Tensor

from samestep.data.collating import name_of
from samestep.data.stream_lanes import Lane, Route
from samestep.data.trees import tree_leaves
from samestep.errors import UserError
from samestep.ranks.world import World

_COMPARED = 8
"""Elements at a stream's beginning by which ranks see that they read the same."""
EACH_ALL = (
    "Each rank must be given the same stream: samestep shares it out. Take out what divides it by "
    "rank (split_by_node, split_dataset_by_node, a nodesplitter) and what draws without a seed."
)


def check_same(stream: Any, route: Route, world: World) -> None:
    """Check that a stream is the same on all ranks, by its shards or its first elements.

    Raises:
        UserError: on every rank, that it is not.
    """
    if not world.connected:
        return
    shards = world.gather(route.lanes)
    if len(set(shards)) > 1:
        raise UserError(
            f"{name_of(stream)} has another number of shards on each rank: {shards}. {EACH_ALL}",
            on_all_ranks=True,
        )
    if route.lanes > 1:
        return  # a rank that read them all would read what belongs to others
    own = world.on_every(lambda: list(map(mark_of, Lane(stream, route, 0).take(_COMPARED))))
    marks = world.gather(own)
    if any(other != own for other in marks):
        raise UserError(
            f"{name_of(stream)} begins with other elements on each rank. {EACH_ALL}",
            on_all_ranks=True,
        )


def leads_back(stream: Any, route: Route) -> bool:
    """Whether a stream's state after one element leads to the second.

    With a shuffle buffer of its own it would not, nor where the state is behind or ahead.

    Raises:
        UserError: the stream cannot be read.
    """
    if not callable(getattr(stream, "state_dict", None)) or _has_buffer(stream):
        return False
    route = replace(route, states=True)
    lane = Lane(stream, route, 0)
    if not lane.take(1):
        return False
    mark, second = lane.mark(), lane.take(1)
    if mark[1] is None or not second:
        return False
    again = replace(route, first_step=1, marks={0: mark})
    try:
        found = Lane(stream, again, 0).take(1)
    except UserError:
        return False
    return list(map(mark_of, found)) == list(map(mark_of, second))


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
        if isinstance(leaf, Tensor):
            digest.update(leaf.detach().cpu().contiguous().numpy().tobytes())
        elif callable(getattr(leaf, "tobytes", None)):
            digest.update(leaf.tobytes())
        elif leaf is None or isinstance(leaf, bool | int | float | complex | str | bytes):
            digest.update(repr(leaf).encode())
        else:  # its text may hold an address
            digest.update(type(leaf).__name__.encode())
    return digest.hexdigest()
