"""Start ranks on this machine and keep a training of theirs going when some of them die.

It sees who dies, names the next group (`ranks.regroup`), and starts a replacement.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from samestep.base.errors import UserError
from samestep.base.run.files import read_object
from samestep.base.settings import Settings
from samestep.launch.ranks.places import Places
from samestep.launch.ranks.process import HUNG
from samestep.launch.ranks.regroup import FAILED, PREFIX, Group, Keys, ready_key
from samestep.launch.ranks.watcher import VERDICT
from samestep.launch.stall.pulse import PULSE

_POLL_EVERY_S = 0.01
_ASK_EVERY_S = 0.1
_LOST_S = 3.0
"""A rank has lost contact, and this much later no rank is seen to have died."""
_END_S = 20.0
"""How long ranks may take to end once one of them has failed."""
_HOUR_S = 3600.0
_RETRY_S = 10.0
"""How long after a newcomer's death before it could join another is started."""

BOUNDS = re.compile(r"(\d+):(\d+)")


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """How few and how many ranks may train, and how often some may die."""

    least: int = 1
    most: int
    replaces: bool = True
    """Whether a new rank is started for one that died."""
    limit: int = 10
    """Deaths within an hour after which the run ends."""


def elastic_of(
    wanted: str | bool,
    num_ranks: int,
    settings: Settings,
    *,
    replaces: bool = True,
    limit: int = 10,
) -> Elastic:
    """Return the value of `--elastic`: MIN:MAX, or just that ranks may die.

    Raises:
        UserError: it is not a pair of numbers, excludes the number of ranks at the start, or does
            not go with the settings.
    """
    if settings.engine != "native":
        raise UserError(
            "--elastic needs --engine native: Lightning stops all ranks when one fails.",
            flags=["elastic", "engine"],
        )
    if settings.batch_size_per_rank is not None:
        raise UserError(
            "--elastic keeps the batch size on any number of ranks: use --batch-size, the samples "
            "per step over all ranks, instead of --batch-size-per-rank.",
            flags=["elastic", "batch_size_per_rank"],
        )
    if limit < 1:
        raise UserError(f"--elastic-limit is {limit}; it must be 1 or more.", flags=["elastic"])
    if wanted in (True, "", "auto"):
        return Elastic(most=num_ranks, replaces=replaces, limit=limit)
    match = BOUNDS.fullmatch(str(wanted))
    least, most = map(int, match.groups()) if match else (0, 0)
    if not 1 <= least <= most:
        raise UserError(
            f"--elastic {wanted}: it should be MIN:MAX, the minimum and maximum number of ranks, "
            "such as 2:4; MIN is 1 or more."
        )
    if not least <= num_ranks <= most:
        raise UserError(
            f"--elastic {wanted}: the run starts with {num_ranks} ranks (--nproc), which is not "
            f"from {least} to {most}."
        )
    return Elastic(least=least, most=most, replaces=replaces, limit=limit)


class RunEnding(Exception):  # noqa: N818 - no error of this process
    """The run is to end; the text says why, unless the ranks' watcher has said it."""


@dataclass
class _KeptRank:
    member: int
    slot: int
    """Its place on this machine, which picks its device."""
    process: subprocess.Popen[bytes]


@dataclass
class Keeper:
    """The ranks of one run and the store by which they find each other."""

    arguments: list[str]
    folder: Path
    elastic: Elastic
    places: Places
    ask: Callable[[], None]
    """Raises `SignalException` if a stop is asked for."""
    living: dict[int, _KeptRank] = field(default_factory=dict)
    group: Group = field(default_factory=lambda: Group(number=0, members=()))
    started: int = 0
    stopping: int = 0
    """The signal that all were asked to stop by, or 0."""
    stopped: int = 0
    """The signal that a rank says it has stopped by, or 0: it may have been done before."""
    finished: bool = False
    """Whether a rank has ended well: the others do so, too."""
    losses: deque[float] = field(default_factory=deque)
    """When ranks died, or lost contact, within the last hour, by a clock that is never set."""
    due: list[tuple[float, int]] = field(default_factory=list)
    """When new ranks are to be started, and in which slots."""
    _awaited: tuple[float, list[str]] | None = None
    """When ranks died, and how, while there are too few for the next group."""

    def keep(self, num_ranks: int) -> int:
        """Start the ranks and wait for their end; return the signal that stopped them, or 0.

        Raises:
            ChildFailedError: a rank has failed.
            RunEnding: too many have died, or they hung.
        """
        server = TCPStore(self.places.address, 0, is_master=True, wait_for_workers=False)
        self.port, self.store = server.port, PrefixStore(PREFIX, server)
        for slot in range(num_ranks):
            self._start(slot)
        self._name_next(time.time())
        asked = 0.0
        starts_more = self.elastic.replaces
        while self.living or (starts_more and self.due and not self.stopping):
            # Those that trained last have ended well: newcomers have nothing to join.
            if self.finished and not any(m in self.living for m in self.group.members):
                break
            try:
                time.sleep(_POLL_EVERY_S)
                if not self.stopping:
                    self.ask()
                self._bury()
                if time.monotonic() - asked > _ASK_EVERY_S:
                    asked = time.monotonic()
                    self._answer()
            except SignalException as stop:
                self.stopping = int(stop.sigval)
                for rank in self.living.values():
                    self.places.pass_on(rank.process, self.stopping)
            except (ChildFailedError, RunEnding):
                self._end_all()
                raise
        self._kill_all()  # newcomers that no group waits for any more
        return self.stopped if self.finished else self.stopping

    def _start(self, slot: int) -> None:
        member, self.started = self.started, self.started + 1
        if self.group.number:
            self.store.set(f"newcomer/{member}", "1")
        safe = ["-P"] if sys.flags.safe_path else []  # as here: a job runs a copy of the code
        command = [sys.executable, *safe, "-m", "samestep", *self.arguments]
        process = self.places.start(member, slot, self.port, command)
        self.living[member] = _KeptRank(member, slot, process)

    def _ended(self) -> list[tuple[_KeptRank, str]]:
        """Return the ranks that have just died, each with how it died."""
        dead = list[tuple[_KeptRank, str]]()
        for member, rank in [*self.living.items()]:
            code = rank.process.poll()
            if code is None:
                continue
            del self.living[member]
            if death := self.places.death(member, rank.slot, code):
                _end_session(rank.process.pid)
                (self.folder / PULSE.format(rank=member)).unlink(missing_ok=True)
                dead.append((rank, death))
            elif 0 < code < 128:
                file = str(self.places.error_file(member))
                place = self._place(rank) if member in self.group.members else 0
                failure = ProcessFailure(place, rank.process.pid, code, file)
                raise ChildFailedError("samestep", {member: failure})
            else:
                self.finished |= member in self.group.members
                self.stopped = self.stopped or max(0, code - 128)
                self.stopping = self.stopping or self.stopped
        return dead

    def _bury(self) -> None:
        """Take note of ranks that have died, and name the next group."""
        now, dead = time.monotonic(), self._ended()
        if not dead or (self.finished and not self.living):
            return
        if read_object(self.folder / VERDICT):
            raise RunEnding  # they were ended because they hung
        of_group = [(rank, death) for rank, death in dead if rank.member in self.group.members]
        if of_group and not self.finished:
            deaths = " and ".join(self._described(rank, death) for rank, death in of_group)
            deaths = deaths[0].upper() + deaths[1:]
            # A node that is lost is one loss, however many ranks it had.
            nodes = {self.places.node_of(rank.slot) for rank, _ in of_group}
            self._count_losses(deaths, len(nodes if self.places.hosts else of_group), now)
            left = sum(member in self.living for member in self.group.members)
            if left < self.elastic.least and not self.elastic.replaces:
                raise RunEnding(
                    f"{deaths}: {left} of {len(self.group.members)} ranks are left, but --elastic "
                    f"needs at least {self.elastic.least}."
                )
        elif not (self.finished or any(m in self.living for m in self.group.members)):
            # No rank trains: successors that die, too, must not be followed by others for ever.
            self._count_losses(f"A new rank {dead[0][1]} before it could join", len(dead), now)
        for rank, _ in dead:
            # A newcomer that dies before it can join is on a node that is not well.
            at_once = rank.member in self.group.members or self._is_ready(rank.member)
            self.due.append((now + (0.0 if at_once else _RETRY_S), rank.slot))
        self._replace(now)
        if of_group:
            began, gone = self._awaited or (time.time(), [])
            self._awaited = began, gone + [self._described(rank, death) for rank, death in of_group]
            self._name_awaited()

    def _replace(self, now: float) -> None:
        """Start the ranks that are due in the place of dead ones."""
        due = [slot for at, slot in self.due if at <= now]
        self.due = [(at, slot) for at, slot in self.due if at > now]
        if self.elastic.replaces and not (self.stopping or self.finished):
            for slot in due:
                self._start(slot)

    def _count_losses(self, what: str, number: int, now: float) -> None:
        """End the run where ranks die, or lose each other, again and again."""
        self.losses.extend([now] * number)
        while self.losses[0] < now - _HOUR_S:
            self.losses.popleft()
        if len(self.losses) > self.elastic.limit:
            raise RunEnding(
                f"{what}: that is number {len(self.losses)} within an hour, and --elastic-limit is "
                f"{self.elastic.limit}."
            )

    def _place(self, rank: _KeptRank) -> int:
        return self.group.members.index(rank.member)

    def _described(self, rank: _KeptRank, death: str) -> str:
        name = f"rank {self._place(rank)}"
        with contextlib.suppress(OSError):
            return f"{name} hung: {(self.folder / HUNG.format(rank=rank.member)).read_text()}"
        return f"{name} {death}"

    def _answer(self) -> None:
        """Name the next group where one is asked for: newcomers wait, or contact was lost."""
        self._replace(time.monotonic())
        ready = [m for m in self.living if m not in self.group.members and self._is_ready(m)]
        if ready and not self.store.check(["waiting"]):
            self.store.set("waiting", "1")
        self._name_awaited()
        if self.store.check(["late"]):
            for member in json.loads(self.store.get("late")):
                if member in self.living:
                    self.living[member].process.kill()
        if self._awaited is not None:  # too few are left for what rank 0 may have asked for before
            return
        keys = Keys(self.group.number)
        if self.store.check([keys.wish]):
            self._name_next(time.time())
        elif self.store.check([keys.lost]) and not self.finished:
            now = time.monotonic()
            first = float(self.store.compare_set(f"{keys.lost}/since", "", str(now)))
            if now - first > _LOST_S:
                # No rank died. A script whose collectives do not fit loses contact each time.
                self._count_losses("Ranks lost contact with each other", 1, now)
                self._name_next(time.time() - (now - first))

    def _is_ready(self, member: int) -> bool:
        return bool(self.store.check([ready_key(member)]))

    def _name_awaited(self) -> None:
        """Name the group after a death, once there are enough ranks for it."""
        if self._awaited is not None:
            stay, come = self._next_members()
            if len(stay) + len(come) >= self.elastic.least:
                self._name_next(*self._awaited)

    def _next_members(self) -> tuple[list[int], list[int]]:
        """Return this group's living members, and those that are ready to join."""
        if not self.group.number:
            return [*self.living], []
        stay = [member for member in self.group.members if member in self.living]
        come = [m for m in self.living if m not in stay and self._is_ready(m)]
        return stay, come[: max(0, self.elastic.most - len(stay))]

    def _node_of(self, member: int) -> int:
        return self.places.node_of(self.living[member].slot)

    def _name_next(self, began: float, gone: list[str] | None = None) -> None:
        stay, come = self._next_members()
        self._awaited = None
        # Ranks of one node follow each other, those of the first member's node first.
        nodes = [self._node_of(member) for member in (*stay, *come)]
        members = sorted((*stay, *come), key=lambda member: nodes.index(self._node_of(member)))
        self.group = Group(
            number=self.group.number + 1,
            members=tuple(members),
            nodes=tuple(map(self._node_of, members)),
            before=len(self.group.members),
            gone=tuple(gone or ()),
            began=began,
        )
        self.store.delete_key("waiting")
        self.store.set(Keys(self.group.number).group, json.dumps(asdict(self.group)))
        self.store.set("newest", str(self.group.number))

    def _end_all(self) -> None:
        """Let the ranks end by themselves, which write down why, then kill those that do not."""
        self.store.set(FAILED, "1")
        until = time.monotonic() + _END_S
        while time.monotonic() < until:
            if all(rank.process.poll() is not None for rank in self.living.values()):
                break
            time.sleep(_POLL_EVERY_S)
        self._kill_all()

    def _kill_all(self) -> None:
        for rank in self.living.values():
            rank.process.kill()
            rank.process.wait()
            _end_session(rank.process.pid)


def _end_session(pid: int) -> None:
    """End what a rank that is gone has started, such as loader workers: they hold its files."""
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
