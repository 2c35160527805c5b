"""What is tried with a stream beforehand: is it the same each time, does its state lead back?"""

import contextlib
import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samestep.data.collating import name_of
from samestep.data.stream_lanes import Lane, Route, num_shards
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
    """Check that a stream is the same on all ranks and each time it is read.

    Its shards are counted, and the first elements of lane 0 compared: the one lane that all read.
    """
    shards = world.gather(num_shards(stream))
    if len(set(shards)) > 1:
        raise UserError(
            f"{name_of(stream)} has another number of shards on each rank: {shards}. {EACH_ALL}",
            on_all_ranks=True,
        )
    own = world.on_every(lambda: _beginning(stream, route))
    marks = world.gather(own)
    if any(other != own for other in marks):
        raise UserError(
            f"{name_of(stream)} begins with other elements on each rank. {EACH_ALL}",
            on_all_ranks=True,
        )


def _beginning(stream: Any, route: Route) -> list[str]:
    """Return the marks of the first elements, which are the same when they are read again."""
    if getattr(stream, "_distributed", None) is not None:  # of Hugging Face
        raise UserError(f"{name_of(stream)} was divided by split_dataset_by_node. {EACH_ALL}")
    first, again = (
        list(map(mark_of, Lane(stream, route, 0).take(_COMPARED))) for _time in range(2)
    )
    if first != again:
        raise UserError(
            f"{name_of(stream)} begins with other elements when it is read a second time. Each "
            "epoch, and a run that goes on, begins it again: let __iter__ begin anew, and seed "
            "what it draws; what depends on the epoch belongs into set_epoch(epoch)."
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
        first, mark, second = lane.take(1), lane.mark(), lane.take(1)
        if not first or not second:
            continue  # too short to try it
        if mark[1] is None:
            return False
        again = replace(route, first_step=1, marks={number: mark})
        try:
            found = Lane(stream, again, number).take(1)
        except UserError:
            return False
        return list(map(mark_of, found)) == list(map(mark_of, second))
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
    known = leaf is None or isinstance(leaf, bool | int | float | complex | str | bytes)
    return repr(leaf).encode() if known else b""  # other texts may hold an address
