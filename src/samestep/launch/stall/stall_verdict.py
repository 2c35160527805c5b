"""Decide whether the ranks have stalled, who is missing where, and what the others wait for."""

import ast
import functools
import itertools
import linecache
import os
import re
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from samestep.base.errors import is_users, listed
from samestep.launch.stall.pulse import (
    NO_GROUP,
    PEER,
    RAISED,
    TIMED_OUT,
    UNKNOWN,
    WORLD,
    RankPulse,
    Visit,
)
from samestep.launch.stall.stacks import RankStand, Stand

Cause = Literal[
    "absent", "left", "ended", "gone", "stopped", "data", "different", "shapes", "unknown"
]
"""`gone`: it ended, and nothing says how."""

_STEPS = 20


def patience(step_times: Sequence[float], least: float = 30.0) -> float:
    """Return after how many seconds without a sign of life the ranks count as stalled."""
    return max(least, _STEPS * statistics.median(step_times)) if step_times else least


def find_stall(
    pulses: Sequence[RankPulse], stall_s: float, now: float | None = None
) -> float | None:
    """Return for how many seconds no rank has moved, if too long; None while anything moves.

    `now` is by `time.monotonic()`, which stands still while the machine is suspended.
    """
    if all(pulse.code is not None for pulse in pulses):
        return None
    now = time.monotonic() if now is None else now
    still = now - max(pulse.moved for pulse in pulses)
    return still if still >= stall_s else None


@dataclass(frozen=True, kw_only=True)
class StallVerdict:
    """Why the ranks have stalled."""

    cause: Cause
    culprits: tuple[int, ...]
    """The ranks that keep the others waiting; none if that is not known."""
    sentence: str
    places: Mapping[int, str]
    """Rank → the user's line where it stands, or was last seen, as FILE:LINE."""
    does: Mapping[int, str]
    """Rank → what it does there."""
    waiting_in: str = ""
    """The call that the others wait in, with its line."""

    @property
    def lines(self) -> list[str]:
        """A line for each rank."""
        return [f"rank {rank} {does}" for rank, does in self.does.items()]


def find_culprit(stands: Sequence[RankStand]) -> StallVerdict:
    """Return the verdict on ranks that have stalled."""
    waits = {stand.rank: visit for stand in stands if (visit := _waits_in(stand))}
    case = _Case({stand.rank: stand for stand in stands}, waits)
    own = [stand for stand in stands if stand.rank not in waits]
    if stopped := [stand for stand in own if stand.doing == "stopped"]:
        return case.keep_waiting(stopped)
    if met := _first_mismatch(stands):
        return case.disagree(met, {rank: visit[:2] for rank, visit in met.items()})
    awaited = {other for rank, visit in waits.items() for other in _awaited(rank, visit, stands)}
    missing = [stand for stand in own if stand.rank in awaited]
    if missing or own:
        running = [stand for stand in own if not _has_ended(stand)]
        return case.keep_waiting(missing or _behind(running) or own)
    return case.disagree(waits, {rank: (v.kind, v.group, v.seq) for rank, v in waits.items()})


def mismatch(pulses: Sequence[RankPulse]) -> StallVerdict | None:
    """Return the mismatch of calls in which ranks have died; None if that is not the cause.

    Where one library waits for ever, another finds a message of a wrong size, and raises or aborts.
    """
    stands = {
        pulse.rank: RankStand(pid=pulse.pid, doing="gone", pulse=pulse.raised())
        for pulse in pulses
        if pulse.calls
    }
    died = any(stand.pulse.calls[-1].state == RAISED for stand in stands.values())
    met = _first_mismatch([*stands.values()]) if died else None
    if met is None:
        return None
    return _Case(stands, met).disagree(met, {rank: visit[:2] for rank, visit in met.items()})


def _behind(stands: Sequence[RankStand]) -> list[RankStand]:
    """Return the ranks with the fewest steps; among these, any that stand in the user's code.

    Where the waiting is a GPU's, no rank is seen to wait for another.
    """
    fewest = min((stand.pulse.steps for stand in stands), default=0)
    behind = [stand for stand in stands if stand.pulse.steps == fewest]
    return [stand for stand in behind if is_users(_split(_place(stand))[0])] or behind


@dataclass(frozen=True)
class _Case:
    stands: Mapping[int, RankStand]
    waits: Mapping[int, Visit]
    """Rank → the call in which it waits for others."""

    def keep_waiting(self, culprits: Sequence[RankStand]) -> StallVerdict:
        """Return the verdict that these ranks do something else than the others."""
        sentences = []
        cause = _cause(culprits[0])
        for stand in culprits:
            has_left = any(_has_left(stand, self.stands[rank]) for rank in self.waits)
            left = f"left the loop{_progress(stand)} and " if has_left else ""
            sentences.append(f"rank {stand.rank} {left}{self._does(stand)}")
            cause = "left" if has_left else cause
        ranks = [stand.rank for stand in culprits]
        for visit, others in self._meeting(ranks):
            who = "ranks" if len(others) > 1 else "rank"
            wait = f"{_wait(visit, len(others))} {_named(visit)} of {_shown(visit.where)}"
            sentences.append(f"{who} {listed([*map(str, others)])} {wait}")
        sentences += self._parting() if cause == "left" else []
        return self._verdict(cause, ranks, "; ".join(sentences))

    def disagree(
        self, met: Mapping[int, Visit], parties: Mapping[int, tuple[object, ...]]
    ) -> StallVerdict:
        """Return the verdict that ranks are in calls that do not fit; `parties`: who agrees."""
        pairs = itertools.permutations(met, 2)
        left = [
            first
            for first, other in pairs
            if parties[first] != parties[other]
            and _has_left(self.stands[first], self.stands[other])
        ]
        if left:
            return self.keep_waiting([self.stands[rank] for rank in dict.fromkeys(left)])
        calls = ", ".join(
            f"rank {rank} in {_named(visit)}{f' {visit.detail}'.rstrip()} of {_shown(visit.where)}"
            for rank, visit in sorted(met.items())
        )
        (most, number), *rest = Counter(parties.values()).most_common()
        if rest:
            tie = number == rest[0][1]
            culprits = [rank for rank, party in parties.items() if tie or party != most]
            same_call = len({visit.kind for visit in met.values()}) == 1 and len(most) == 2
            problem = "the ranks' calls do not meet"
            if same_call:
                problem = "the ranks pass different tensors"
            text = "; ".join([f"{problem}: {calls}", *self._parting()])
            return self._verdict("shapes" if same_call else "different", culprits, text)
        busy = [stand for stand in self.stands.values() if stand.doing == "computes"]
        if busy and len(busy) < len(self.stands):
            return self.keep_waiting(busy)
        return self._verdict("unknown", [], f"all ranks are there, but none moves: {calls}")

    def _meeting(self, but: Sequence[int]) -> list[tuple[Visit, list[int]]]:
        """Return the calls that the other ranks wait in, each with its ranks."""
        meetings: dict[tuple[object, ...], tuple[Visit, list[int]]] = {}
        for rank, visit in sorted(self.waits.items()):
            if rank not in but:
                key = (visit.kind, visit.group, visit.seq, visit.where)
                meetings.setdefault(key, (visit, []))[1].append(rank)
        return [*meetings.values()]

    def _parting(self) -> list[str]:
        """Return a list with the first call that ranks made from different lines, or an empty one.

        A rank that evaluates by itself in a wrapped model continues one call ahead of the others.
        """
        for met in sorted(_meetings([*self.stands.values()]), key=_begin):
            if len({visit.where for visit in met.values()}) > 1:
                first = next(iter(met.values()))
                callers = ", ".join(f"rank {r} from {_shown(v.where)}" for r, v in met.items())
                return [f"{_named(first)} was called by {callers}"]
        return []

    def _does(self, stand: RankStand) -> str:
        visit = self.waits.get(stand.rank)
        if visit is None:
            return _describe_alone(stand)
        return f"{_wait(visit)} {_named(visit)} of {_shown(visit.where)}"

    def _verdict(self, cause: Cause, culprits: Sequence[int], text: str) -> StallVerdict:
        met = [f"{_named(v)} of {_shown(v.where)}" for v, _ in self._meeting(culprits)]
        return StallVerdict(
            cause=cause,
            culprits=tuple(sorted(culprits)),
            waiting_in="; ".join(met),
            sentence=f"{text[:1].upper()}{text[1:]}.",
            places={rank: _place(stand) for rank, stand in sorted(self.stands.items())},
            does={rank: self._does(stand) for rank, stand in sorted(self.stands.items())},
        )


def _has_ended(stand: RankStand) -> bool:
    return stand.doing == "gone" or stand.pulse.code is not None


def _cause(stand: RankStand) -> Cause:
    if _has_ended(stand):
        return "ended" if stand.pulse.code is not None else "gone"
    return "stopped" if stand.doing == "stopped" else "data" if stand.waits_for_data else "absent"


_TORCH_WAITS = re.compile(
    r"[/\\]torch[/\\](distributed[/\\](?!checkpoint|elastic|rpc)|nn[/\\]parallel)"
    r"|[/\\]samestep[/\\](launch[/\\]ranks[/\\](world|process)|core[/\\]loops[/\\]gradients)\.py$"
)
# DDP reduces gradients within the backward pass, in C++.
_BACKWARD = re.compile(r"[/\\]torch[/\\](autograd[/\\]|_tensor\.py)")


def _waits_in(stand: RankStand) -> Visit | None:
    """Return the call in which a rank waits for others; None if it does something of its own."""
    if _has_ended(stand):
        return next((v for v in stand.pulse.calls[-1:] if v.state == RAISED), None)
    if stand.doing == "stopped":
        return None
    now = stand.pulse.now
    if stand.pulse.doing == TIMED_OUT:
        return now
    if now and (now.group == NO_GROUP or (stand.frames and not stand.place.endswith(now.where))):
        now = None  # it runs the user's code within, as a hook of a backward
    if now and now.kind != UNKNOWN:
        return now
    # A function that the script had imported by name before it could be noted.
    inner = [*itertools.takewhile(lambda frame: not is_users(frame.file), stand.frames)]
    is_wait = _BACKWARD if inner and _BACKWARD.search(inner[0].file) else _TORCH_WAITS
    waits = [*itertools.takewhile(lambda frame: is_wait.search(frame.file), inner)]
    if not waits or (is_wait is _BACKWARD and stand.doing != "sleeps"):
        return now
    named = [frame.function for frame in waits if not frame.file.endswith("c10d_logger.py")]
    return Visit(named[-1] if named else "a collective", where=stand.place, group=WORLD)


def _awaited(rank: int, visit: Visit, stands: Sequence[RankStand]) -> set[int]:
    """Return the ranks that have not come to where a rank waits."""
    others = {stand.rank for stand in stands} - {rank}
    ranks = visit.group.rpartition(":")[2]
    if visit.group.startswith(PEER):
        return {int(ranks)} if ranks else others
    members = {int(member) for member in ranks.split(",") if member.isdigit()} or others
    if visit.group.endswith(":"):  # too many to be listed: those that were there before
        members = {stand.rank for stand in stands if _latest(stand.pulse, visit.group)}
    came = {stand.rank for stand in stands if _latest(stand.pulse, visit.group) >= visit.seq > 0}
    return (others & members) - came


def _latest(pulse: RankPulse, group: str) -> int:
    return max((visit.seq for visit in pulse.calls if visit.group == group), default=0)


def _meetings(stands: Sequence[RankStand]) -> list[dict[int, Visit]]:
    """Return the calls by which ranks met, of which more than one is known, each by rank."""
    meetings: dict[tuple[str, int], dict[int, Visit]] = defaultdict(dict)
    for stand in stands:
        for visit in stand.pulse.calls:
            if not visit.group.startswith(PEER):
                meetings[visit.group, visit.seq][stand.rank] = visit
    return [met for met in meetings.values() if len(met) > 1]


def _begin(met: Mapping[int, Visit]) -> float:
    return min(visit.time for visit in met.values())


def _first_mismatch(stands: Sequence[RankStand]) -> dict[int, Visit] | None:
    """Return the first calls by which ranks met without calling the same."""
    for met in sorted(_meetings(stands), key=_begin):
        visits = [*met.values()]
        group, seq = visits[0].group, visits[0].seq
        # Shapes that differ may be right where all have gone on.
        last = any(seq == _latest(stand.pulse, group) for stand in stands)
        stays = last or any(visit.state != "left" for visit in visits)
        if len({v.kind for v in visits}) > 1 or (stays and len({v.detail for v in visits}) > 1):
            return met
    return None


def _has_left(stand: RankStand, other: RankStand) -> bool:
    """Whether a rank has left the loop that another is in."""
    if stand.pulse.code is not None and not _waits_in(stand):
        return False  # it is said to have ended
    loops = {loop for place in _users_lines(other) for loop in _loops_around(*place)}
    stands_in = {loop for place in _users_lines(stand) for loop in _loops_around(*place)}
    was_at = [_split(visit.where) for visit in stand.pulse.calls]
    been_in = {loop for place in was_at for loop in _loops_around(*place)}
    left = (loops - stands_in) & been_in
    if not loops & stands_in:
        return bool(left)
    # Both are in an outer loop. The inner one may be that of a few tensors within one step.
    steps = [_split(visit.where) for visit in stand.pulse.calls if visit.kind == "backward"]
    return any(loop in left for place in steps for loop in _loops_around(*place))


def _users_lines(stand: RankStand) -> list[tuple[str, int]]:
    lines = [(frame.file, frame.line) for frame in stand.frames if is_users(frame.file)]
    return lines or [_split(_place(stand))]


def _loops_around(file: str, line: int) -> list[tuple[str, int, int]]:
    return [(file, first, last) for first, last in _loops(file) if first <= line <= last]


@functools.cache
def _loops(file: str) -> list[tuple[int, int]]:
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    loops = (node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While))
    return [(loop.lineno, loop.body[-1].end_lineno or 0) for loop in loops]


def _split(place: str) -> tuple[str, int]:
    file, _, line = place.rpartition(":")
    return file, int(line or 0)


def _place(stand: RankStand) -> str:
    workers = [worker.place for worker in _busy(stand) if worker.place]
    if workers or stand.place:
        return workers[0] if workers else stand.place
    visits = [stand.pulse.now] if stand.pulse.now else stand.pulse.calls[-1:]
    return visits[0].where if visits else ""


def _describe_alone(stand: RankStand) -> str:
    """Describe a rank that waits in no call for others."""
    if stand.pulse.code is not None:
        return f"ended with exit code {stand.pulse.code}{_progress(stand)}"
    last_seen = f"; last seen at {_shown(_place(stand))}" if _place(stand) else ""
    if stand.doing == "gone":
        return f"was ended or killed{last_seen}"
    if stand.doing == "stopped":
        return _at(stand) if stand.frames else f"is stopped by a signal{last_seen}"
    if not stand.frames:
        return f"does not say where it stands{last_seen}"
    if not stand.waits_for_data:
        return _at(stand)
    busy = [f"; its loader worker {worker.pid} {_at(worker)}" for worker in _busy(stand)]
    return f"waits for data at {_shown(stand.place)}{listed(busy, most=1)}"


def _busy(stand: RankStand) -> list[Stand]:
    """Return the loader workers that make a sample, or cannot."""
    return [
        worker
        for worker in stand.workers
        if worker.doing == "stopped"
        or worker.place
        or any(Path(frame.file).name == "fetch.py" for frame in worker.frames)
    ]


_VERBS = {
    "computes": "computes in",
    "blocked": "is blocked in a system call in",
    "stopped": "is stopped by a signal in",
}


def _at(stand: Stand) -> str:
    """Return the place of a process, with the line's text."""
    if not stand.frames:
        return "is stopped by a signal"
    file, line = _split(stand.place or "{}:{}".format(*stand.frames[0]))
    text = linecache.getline(file, line).strip()
    where = _shown(f"{file}:{line}") + (f" `{text}`" if text else "")
    return f"{_VERBS.get(stand.doing, 'stands in')} {where}"


def _progress(stand: RankStand) -> str:
    """Return " after 12 steps", or nothing."""
    number, noun = stand.pulse.steps, "step"
    if not number:
        number, noun = _latest(stand.pulse, "backward"), "backward pass"
    if not number and (collectives := [v for v in stand.pulse.calls if v.group == WORLD]):
        last = collectives[-1]
        number, noun = last.seq - (last.state == "inside"), "collective"
    if number != 1:
        noun += "es" if noun.endswith("s") else "s"
    return f" after {number} {noun}" if number else ""


def _wait(visit: Visit, number: int = 1) -> str:
    return "failed in" if visit.state == RAISED else "waits in" if number == 1 else "wait in"


def _named(visit: Visit) -> str:
    if visit.group.startswith(PEER):
        peer = visit.group.removeprefix(PEER)
        return f"{visit.kind} with rank {peer}" if peer else visit.kind
    return f"{visit.kind} #{visit.seq}" if visit.seq else visit.kind


def _shown(place: str) -> str:
    """Return a place as the user would write it from here."""
    file, line = _split(place)
    here = f"{os.getcwd()}{os.sep}"  # noqa: PTH109 - a text
    return f"{file.removeprefix(here)}:{line}"
