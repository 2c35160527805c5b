"""Ranks that outlive each other: which group a rank is in, and how it finds the next one.

The process that starts the ranks, the keeper (`ranks.keeper`), sees which of them die and holds the
store. It numbers the groups and names the members of each, in the order of their ranks. A rank that
loses another gives up its connections, waits for the next group, and joins that.
"""

import contextlib
import datetime as dt
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from samestep.base.errors import AlreadyTold
from samestep.base.startup import resume_collections
from samestep.launch.ranks.process import MEMBER
from samestep.launch.ranks.world import Store, World, choose_interface, connect, in_process_group

PREFIX = "samestep/groups"
"""Of the keys in the store: see `Keys`."""
_POLL_EVERY_S = 0.004
_MEET_S, _MEET_PER_RANK_S = 2.0, 0.05
"""How long ranks that are all there may take to connect; one of them may die just then."""


@dataclass(frozen=True)
class Keys:
    """The keys of one group in the store."""

    number: int

    @property
    def group(self) -> str:
        """What the keeper tells of it: a `Group` in JSON."""
        return f"{self.number}/group"

    @property
    def lost(self) -> str:
        """Set by a rank that has lost contact with another of the group."""
        return f"{self.number}/lost"

    @property
    def wish(self) -> str:
        """Set by rank 0: the group parts, for newcomers to join."""
        return f"{self.number}/wish"

    def present(self, member: int) -> str:
        """Set by a member that is about to connect."""
        return f"{self.number}/here/{member}"


FAILED = "failed"
"""The key that says that the run has failed: no group follows."""


def ready_key(member: int) -> str:
    """Return the key by which a newcomer says that it can join."""
    return f"ready/{member}"


@dataclass(frozen=True, kw_only=True)
class Group:
    """Those that train together, until one of them dies or another joins."""

    number: int
    members: tuple[int, ...]
    """In the order of their ranks."""
    nodes: tuple[int, ...] = ()
    """The number of the node of each."""
    before: int = 0
    """How many members the group before had."""
    gone: tuple[str, ...] = ()
    """Why members of the group before are not in it, a phrase each."""
    began: float = 0.0
    """When the keeper saw the end of the group before, in seconds since the epoch."""


class RunFailed(AlreadyTold):
    """The run has failed on another rank, which says why: there is no next group."""

    def __init__(self) -> None:
        super().__init__(1)


@dataclass
class Membership:
    """This rank's part in the groups of a run."""

    member: int
    store: Store
    timeout_s: float
    group: Group | None = None
    sockets: Mapping[int, str] = field(default_factory=dict)
    """Those that connect this rank with the others: file descriptor → what it is."""

    def join(self, world: World) -> World:
        """Join the next group that this rank is a member of; return its world.

        Raises:
            RunFailed: the run has failed on another rank.
        """
        while True:
            group = self.next_group()
            rank = group.members.index(self.member)
            joined = replace(
                world,
                rank=rank,
                world_size=len(group.members),
                local_world_size=group.nodes.count(group.nodes[rank]),
                node=sorted({*group.nodes}).index(group.nodes[rank]),
                num_nodes=len({*group.nodes}),
                backend=world.backend if len(group.members) > 1 else "none",
                elastic=True,
            )
            if self._all_here(group) and self._connected(joined, group):
                return joined

    def next_group(self) -> Group:
        """Wait for a group after this rank's and return it; a rank that was left out ends here."""
        before = 0 if self.group is None else self.group.number
        while True:
            while (number := self._newest()) <= before:
                time.sleep(_POLL_EVERY_S)
            group = msgspec.json.decode(self.store.get(Keys(number).group), type=Group)
            if self.member in group.members:
                self.group = group
                return group
            if self.group is not None:
                os._exit(0)  # it was thought dead, and others have taken its share
            before = number  # a newcomer waits until there is room

    def part(self) -> None:
        """Give up the connections to a group: its other ranks then see at once that it is no more.

        Objects that hold the group, such as a DDP model, live on, and with them Gloo's sockets,
        also after `abort`. A rank that waits for this one, and not for the dead one, would do so
        for ever: so the sockets are shut down.
        """
        if self.group is not None:
            self.store.set(Keys(self.group.number).lost, "1")
        open_now = _sockets()
        for number in (n for n, what in self.sockets.items() if open_now.get(n) == what):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as open_one:
                open_one.getpeername()  # Gloo's listener has none: without it Gloo ends the process
                open_one.shutdown(socket.SHUT_RDWR)
        self.sockets = {}
        if in_process_group():
            for group in [*dist.distributed_c10d._world.pg_map]:  # noqa: SLF001 - threads have their own
                with contextlib.suppress(RuntimeError):
                    group.abort()
            dist.destroy_process_group()

    @property
    def regroups(self) -> int:
        """How many groups there were before this rank's."""
        return 0 if self.group is None else self.group.number - 1

    def run(self) -> str:
        """Return the run directory, if a group has opened it."""
        return str(self.store.get("run").decode()) if self.store.check(["run"]) else ""

    def announce_run(self, path: Path) -> None:
        """Tell the groups that follow where the run is."""
        self.store.set("run", str(path))

    def wait_to_join(self) -> None:
        """Say that this newcomer can join."""
        self.store.set(ready_key(self.member), "1")

    def has_failed(self) -> bool:
        """Wait for what the keeper makes of a lost rank; return whether the run has failed."""
        assert self.group is not None
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            try:
                if self._newest() > self.group.number:
                    return False
            except RunFailed:
                return True
            time.sleep(_POLL_EVERY_S)
        return False

    def someone_waits(self) -> bool:
        """Whether a newcomer is ready to join; rank 0 asks, twice a second."""
        return bool(self.store.check(["waiting"]))

    def make_room(self) -> None:
        """Ask the keeper for a next group, with those that wait; rank 0 calls it."""
        assert self.group is not None
        self.store.set(Keys(self.group.number).wish, "1")

    def _newest(self) -> int:
        if self.store.check([FAILED]):
            raise RunFailed
        return int(self.store.get("newest")) if self.store.check(["newest"]) else 0

    def _all_here(self, group: Group) -> bool:
        """Wait until all members are about to connect; False once there is a newer group."""
        keys = Keys(group.number)
        self.store.set(keys.present(self.member), "1")
        everyone = [keys.present(member) for member in group.members]
        until = time.monotonic() + self.timeout_s
        while not self.store.check(everyone):
            if self._newest() > group.number:
                return False
            if time.monotonic() > until:
                late = [m for m in group.members if not self.store.check([keys.present(m)])]
                self.store.set("late", json.dumps(late))
            time.sleep(_POLL_EVERY_S)
        return True

    def _connected(self, world: World, group: Group) -> bool:
        """Connect; False if that failed, as a member has died meanwhile."""
        if world.device.type == "cuda":
            torch.cuda.set_device(world.device)
        if world.world_size == 1:
            return True
        choose_interface(world)
        before, patience_s = _sockets(), _MEET_S + _MEET_PER_RANK_S * world.world_size
        try:
            connect(world, PrefixStore(f"{group.number}/connect", self.store), patience_s)
            dist.distributed_c10d._set_pg_timeout(dt.timedelta(seconds=self.timeout_s), None)  # noqa: SLF001
        except (dist.DistError, RuntimeError):
            self.part()
            return False
        self.sockets = {n: socket for n, socket in _sockets().items() if before.get(n) != socket}
        return True


def _sockets() -> dict[int, str]:
    """Return the open sockets of this process, by file descriptor (on Linux)."""
    sockets = {}
    for path in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):  # it was the folder itself
            if (target := str(path.readlink())).startswith("socket:"):
                sockets[int(path.name)] = target
    return sockets


def membership(timeout_s: float) -> Membership | None:
    """Return this rank's membership if a keeper has started it."""
    if MEMBER not in os.environ:
        return None
    resume_collections()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    server = TCPStore(address, port, is_master=False, wait_for_workers=False)
    return Membership(int(os.environ[MEMBER]), PrefixStore(PREFIX, server), timeout_s)


def is_newcomer(own: Membership) -> bool:
    """Whether this rank was started in the place of another, while a group trains."""
    return bool(own.store.check([f"newcomer/{own.member}"]))
