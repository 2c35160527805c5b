"""Where ranks that hang stand: a report of each in files, and the one verdict that all make."""

import linecache
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from samestep.base.errors import listed
from samestep.base.run.files import write_text
from samestep.launch.stall.pulse import STACKS, RankPulse, Visit
from samestep.launch.stall.stacks import RankStand, Stand, host_name
from samestep.launch.stall.stall_verdict import StallVerdict, find_culprit

TEXT, STAND = "rank-{rank}.stall", ".stall-rank-{rank}.json"
"""In the run directory: where a rank stands, for people and for the verdict."""


@dataclass(frozen=True, kw_only=True)
class StandReport:
    """Where a rank stands, as another node reads it; its times are by `time.time()`."""

    stand: RankStand
    host: str = field(default_factory=host_name)
    at: float = field(default_factory=time.time)

    @property
    def still_s(self) -> float:
        """Seconds since its last sign of life."""
        return self.at - self.stand.pulse.moved


def write_report(stand: RankStand, folder: Path, run: Path) -> None:
    """Write a rank's stand into the run directory; `folder` has its pulse."""
    report = StandReport(stand=replace(stand, pulse=_by_wall_clock(stand.pulse)))
    try:
        stacks = (folder / STACKS.format(rank=stand.rank)).read_text(errors="replace")
    except OSError:
        stacks = ""
    (run / TEXT.format(rank=stand.rank)).write_text("\n".join([*_lines(report), stacks]))
    text = msgspec.json.encode(report).decode()
    write_text(run / STAND.format(rank=stand.rank), text, sync=False)


def read_reports(run: Path, since: float) -> list[StandReport]:
    """Return the reports of ranks since a time, in rank order."""
    reports = []
    for file in run.glob(STAND.format(rank="*")):
        try:
            report = msgspec.json.decode(file.read_bytes(), type=StandReport)
        except (OSError, msgspec.MsgspecError):
            continue
        if report.at >= since:
            reports.append(report)
    return sorted(reports, key=lambda report: report.stand.rank)


def _by_wall_clock(pulse: RankPulse) -> RankPulse:
    """Return a pulse with times that other nodes can compare."""
    shift = time.time() - time.monotonic()

    def moved(visit: Visit) -> Visit:
        return visit._replace(time=visit.time + shift)

    calls, now = tuple(map(moved, pulse.calls)), pulse.now and moved(pulse.now)
    return replace(pulse, moved=pulse.moved + shift, calls=calls, now=now)


def _lines(report: StandReport) -> list[str]:
    stand, pulse = report.stand, report.stand.pulse
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(report.at))
    lines = [
        f"rank {stand.rank} on {report.host}, process {stand.pid}, {when}",
        f"{pulse.phase}, {pulse.steps} steps; no sign of life for {report.still_s:.0f} s",
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


@dataclass(frozen=True, kw_only=True)
class Stalled:
    """The verdict as the user reads it, and as result.json has it."""

    message: str
    rank: int
    """The rank that keeps the others waiting; the first one if there are several."""
    sure: bool
    """Whether that is known."""
    stall: dict[str, Any]


def verdict_on(
    reports: Sequence[StandReport], world_size: int, *, may_be_slow: bool
) -> Stalled | None:
    """Return the verdict on a job's ranks; None if they may be slow.

    They may if all compute, or one compiles. `world_size` ranks should have reported.
    """
    stands = [report.stand for report in reports]
    computes = all(stand.doing == "computes" for stand in stands)
    frames = (frame for stand in stands for frame in stand.frames)
    if may_be_slow and (computes or any(_COMPILER.search(frame.file) for frame in frames)):
        return None
    verdict = find_culprit(stands)
    by_rank = {report.stand.rank: report for report in reports}
    missing = [rank for rank in range(world_size) if rank not in by_rank]
    # A rank that has said nothing at all is on a node that is gone, or was never started.
    silent = missing[0] if missing and not verdict.culprits else None
    rank = silent if silent is not None else (verdict.culprits or (stands[0].rank,))[0]
    host = by_rank[rank].host if rank in by_rank else ""
    file, _, line = verdict.places.get(rank, "").rpartition(":")
    return Stalled(
        message=_message(verdict, reports, missing, rank),
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
    verdict: StallVerdict, reports: Sequence[StandReport], missing: Sequence[int], rank: int
) -> str:
    by_rank = {report.stand.rank: report for report in reports}
    report = by_rank.get(rank)
    sentence = verdict.sentence[:1].lower() + verdict.sentence[1:].rstrip(".")
    shown = [report] if report and len(verdict.culprits) == 1 else reports
    still = f"for {max(report.still_s for report in shown):.0f} s"
    if report is None:
        who = "rank" if len(missing) == 1 else "ranks"
        who += f" {', '.join(map(str, missing))}"
        return f"{who} did not report where it is; {listed(verdict.lines, between='; ')}"
    who = f"rank {rank} on {report.host}"
    if len(verdict.culprits) != 1 or verdict.cause in ("different", "shapes", "left", "unknown"):
        return f"no rank moved {still}: {sentence}"
    does = verdict.does[rank]
    it = f"it {does}" if verdict.cause not in ("ended", "gone") else does
    pulse = report.stand.pulse
    if "#" in verdict.waiting_in:
        return f"{who} has not entered {verdict.waiting_in} that the others wait in; {it}"
    step = f"step {pulse.steps + 1}"
    doing = f"the {pulse.doing} after step {pulse.steps}" if pulse.steps else f"the {pulse.doing}"
    return f"{who} took no part in {doing if pulse.doing else step} {still}; {it}"
