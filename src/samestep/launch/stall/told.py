"""What the ranks of a node that hang leave in files, and the one verdict that is made of all."""

import linecache
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from samestep.base.errors import listed
from samestep.launch.stall.judge import StallVerdict, judge
from samestep.launch.stall.pulse import STACKS, RankPulse, Visit
from samestep.launch.stall.stacks import RankStand, Stand, host_name

TEXT, STAND = "rank-{rank}.stall", ".stall-rank-{rank}.json"
"""In the run directory: where a rank stands, for people and for the verdict."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """Where a rank stands, as another node reads it; its times are by `time.time()`."""

    stand: RankStand
    host: str = field(default_factory=host_name)
    at: float = field(default_factory=time.time)

    @property
    def still_s(self) -> float:
        """Seconds since its last sign of life."""
        return self.at - self.stand.pulse.moved


def tell(stand: RankStand, folder: Path, run: Path) -> None:
    """Write where a rank stands into the run directory; `folder` has its pulse."""
    told = Told(stand=replace(stand, pulse=_by_wall_clock(stand.pulse)))
    try:
        stacks = (folder / STACKS.format(rank=stand.rank)).read_text(errors="replace")
    except OSError:
        stacks = ""
    (run / TEXT.format(rank=stand.rank)).write_text("\n".join([*_lines(told), stacks]))
    file = run / STAND.format(rank=stand.rank)
    temporary = file.with_suffix(".tmp")
    temporary.write_bytes(msgspec.json.encode(told))
    temporary.replace(file)


def read_told(run: Path, since: float) -> list[Told]:
    """Return what ranks have told since a time, in rank order."""
    found = []
    for file in run.glob(STAND.format(rank="*")):
        try:
            told = msgspec.json.decode(file.read_bytes(), type=Told)
        except (OSError, msgspec.MsgspecError):
            continue
        if told.at >= since:
            found.append(told)
    return sorted(found, key=lambda told: told.stand.rank)


def _by_wall_clock(pulse: RankPulse) -> RankPulse:
    """Return a pulse with times that other nodes can compare."""
    shift = time.time() - time.monotonic()

    def moved(visit: Visit) -> Visit:
        return visit._replace(time=visit.time + shift)

    calls, now = tuple(map(moved, pulse.calls)), pulse.now and moved(pulse.now)
    return replace(pulse, moved=pulse.moved + shift, calls=calls, now=now)


def _lines(told: Told) -> list[str]:
    stand, pulse = told.stand, told.stand.pulse
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(told.at))
    lines = [
        f"rank {stand.rank} on {told.host}, process {stand.pid}, {when}",
        f"{pulse.phase}, {pulse.steps} steps; no sign of life for {told.still_s:.0f} s",
        f"the process: {stand.doing}",
        *_stack("main thread", stand),
    ]
    for worker in stand.workers:
        lines += _stack(f"loader worker {worker.pid}", worker)
    if pulse.calls:
        lines += ["", "last calls that ranks meet in:"]
    lines += [f"  #{v.seq} {v.kind} {v.detail} {v.state}  {v.where}" for v in pulse.calls[-20:]]
    return [*lines, "", "all threads:"]


def _stack(name: str, stand: Stand) -> list[str]:
    lines = ["", f"{name}, the innermost line first:"]
    for frame in stand.frames:
        lines.append(f"  {frame.file}:{frame.line} in {frame.function}")
        if text := linecache.getline(frame.file, frame.line).strip():
            lines.append(f"    {text}")
    return lines if stand.frames else [*lines, "  unknown: it did not answer"]


# A model that is compiled runs within `_dynamo`, too.
_COMPILER = re.compile(r"[/\\]torch[/\\](_inductor|_dynamo[/\\](convert_frame|symbolic_convert))")


def _files(stands: Sequence[RankStand]) -> list[str]:
    return [frame.file for stand in stands for frame in stand.frames]


@dataclass(frozen=True, kw_only=True)
class Stalled:
    """The verdict as the user reads it, and as result.json has it."""

    message: str
    rank: int
    """The rank that keeps the others waiting; the first one if there are several."""
    sure: bool
    """Whether that is known."""
    stall: dict[str, Any]


def verdict_on(all_told: Sequence[Told], world_size: int, *, may_be_slow: bool) -> Stalled | None:
    """Return the verdict on a job's ranks; None if they may be slow.

    They may if all compute, or one compiles. `world_size` ranks should have told where they stand.
    """
    stands = [told.stand for told in all_told]
    computes = all(stand.doing == "computes" for stand in stands)
    if may_be_slow and (computes or any(_COMPILER.search(file) for file in _files(stands))):
        return None
    verdict = judge(stands)
    by_rank = {told.stand.rank: told for told in all_told}
    missing = [rank for rank in range(world_size) if rank not in by_rank]
    # A rank that has said nothing at all is on a node that is gone, or was never started.
    silent = missing[0] if missing and not verdict.culprits else None
    rank = silent if silent is not None else (verdict.culprits or (stands[0].rank,))[0]
    host = by_rank[rank].host if rank in by_rank else ""
    file, _, line = verdict.places.get(rank, "").rpartition(":")
    return Stalled(
        message=_message(verdict, all_told, missing, rank),
        rank=rank,
        sure=bool(verdict.culprits),
        stall={
            "rank": rank,
            "host": host,
            "file": file,
            "line": int(line or 0),
            "waiting_in": verdict.waiting_in,
        },
    )


def _message(
    verdict: StallVerdict, all_told: Sequence[Told], missing: Sequence[int], rank: int
) -> str:
    by_rank = {told.stand.rank: told for told in all_told}
    told = by_rank.get(rank)
    sentence = verdict.sentence[:1].lower() + verdict.sentence[1:].rstrip(".")
    seen = [told] if told and len(verdict.culprits) == 1 else all_told
    still = f"for {max(told.still_s for told in seen):.0f} s"
    if told is None:
        who = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        return f"{who} did not say where it stands; {listed(verdict.lines, between='; ')}"
    who = f"rank {rank} on {told.host}"
    if len(verdict.culprits) != 1 or verdict.cause in ("different", "shapes", "left", "unknown"):
        return f"no rank moved {still}: {sentence}"
    does = verdict.does[rank]
    it = f"it {does}" if verdict.cause not in ("ended", "gone") else does
    pulse = told.stand.pulse
    if "#" in verdict.waiting_in:
        return f"{who} has not entered {verdict.waiting_in} that the others wait in; {it}"
    step = f"step {pulse.steps + 1}"
    what = f"the {pulse.doing} after step {pulse.steps}" if pulse.steps else f"the {pulse.doing}"
    return f"{who} took no part in {what if pulse.doing else step} {still}; {it}"
