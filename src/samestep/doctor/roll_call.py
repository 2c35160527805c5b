"""Who is here: ranks meet at the store behind the master address before any of them joins.

A collective would hang for one who is missing. At the store, rank 0 counts who came, and tells
the others whether to go on.
"""

import datetime as dt
import threading
import time
from collections.abc import Sequence

import msgspec

from samestep.ranks.world import Store

_LOOK_EVERY_S = 0.05
_FAREWELL_S = 3.0
_MARGIN_S = 15.0


class Instructions(msgspec.Struct, frozen=True):
    """What rank 0 tells all others after the roll call."""

    join: bool
    on_cpu: bool = False
    """Whether to connect by Gloo on the CPU, since not every rank has a GPU of its own."""
    first_ranks: tuple[int, ...] = ()


def collect_facts(
    store: Store, mine: bytes, world_size: int, timeout_s: float, ended: threading.Event
) -> list[bytes | None]:
    """Return what each rank, rank 0 first, says of itself; None for those that have not come.

    Rank 0 waits for the rest until the timeout, or until `ended` is set.
    """
    deadline = time.monotonic() + timeout_s
    others = range(1, world_size)
    return [mine, *(_wait_for(store, f"rank/{rank}", deadline, ended) for rank in others)]


def announce(store: Store, rank: int, mine: bytes, timeout_s: float) -> Instructions:
    """Say that this rank is here, and return what rank 0 tells it to do.

    Raises:
        RuntimeError: rank 0 has not answered in time, or is gone.
    """
    store.set(f"rank/{rank}", mine.decode())
    store.wait(["orders"], dt.timedelta(seconds=timeout_s + _MARGIN_S))
    instructions = msgspec.json.decode(store.get("orders"), type=Instructions)
    store.set(f"read/{rank}", "1")
    return instructions


def instruct(store: Store, instructions: Instructions, others: Sequence[int]) -> None:
    """Tell the others, and wait until they know: the store may end with this process."""
    store.set("orders", msgspec.json.encode(instructions).decode())
    deadline = time.monotonic() + _FAREWELL_S
    for rank in others:
        _wait_for(store, f"read/{rank}", deadline)


def read_failures(store: Store, world_size: int) -> dict[int, str]:
    """Return why other ranks lost each other, of those that could still say so."""
    deadline = time.monotonic() + _FAREWELL_S
    found = {rank: _wait_for(store, f"failed/{rank}", deadline) for rank in range(1, world_size)}
    return {rank: reason.decode() for rank, reason in found.items() if reason is not None}


def _wait_for(
    store: Store, key: str, deadline: float, ended: threading.Event | None = None
) -> bytes | None:
    """Return a key's value once it is there; None at the deadline, or at the end.

    It looks again and again, since Python notices no signal while PyTorch's store waits.
    """
    ended = ended or threading.Event()
    while not store.check([key]):
        if time.monotonic() > deadline or ended.wait(_LOOK_EVERY_S):
            return None
    return bytes(store.get(key))
