"""Where the ranks of a job stand: read from the pulses that its nodes write into the run directory.

Each node writes one file every few seconds, with how long ago each of its ranks ended a step.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from samestep.base.words import duration
from samestep.launch.ranks.watched import HEARTBEAT


@dataclass(frozen=True, kw_only=True)
class LastSign:
    """What one rank did last."""

    rank: int
    host: str
    step: int | None
    """The last step that ended; None for a script, whose steps have no numbers."""
    phase: str
    call: str  # the collective that it is in, or was in last
    age_s: float  # since the rank's last step, collective or line
    silent_s: float  # since its node last wrote

    @property
    def sentence(self) -> str:
        """Who it is, since when it is silent, and where it stands."""
        step = "" if not self.step else f"; last step {self.step:,}"
        where = " in " + (self.call or self.phase) if self.call or self.phase else ""
        return f"rank {self.rank} on {self.host}: nothing for {duration(self.age_s)}{where}{step}"


class _Rank(msgspec.Struct):
    rank: int
    step: int | None = None
    phase: str | None = None
    age_s: float = 0.0
    call: str | None = None


class _Node(msgspec.Struct):
    time: float
    host: str
    ranks: list[_Rank]


def read_pulses(run: Path, since: float = 0.0) -> list[LastSign]:
    """Return all ranks' pulses, the longest silent first; `since` leaves out earlier starts'."""
    pulses = []
    for path in run.glob(HEARTBEAT.format(node="*")):
        try:
            node = msgspec.json.decode(path.read_bytes(), type=_Node)
            written = path.stat().st_mtime  # by the file server's clock, as `since` is
        except (OSError, RecursionError, msgspec.MsgspecError):
            continue  # it is being replaced, or of another version
        if written < since:
            continue
        silent_s = max(0.0, time.time() - node.time)
        pulses += [
            LastSign(
                rank=r.rank,
                host=node.host,
                step=r.step,
                phase=r.phase or "",
                call=r.call or "",
                age_s=r.age_s,
                silent_s=silent_s,
            )
            for r in node.ranks
        ]
    # Of ranks that wait for each other, the one that began to wait last is not a cause.
    return sorted(pulses, key=lambda pulse: (-pulse.age_s, pulse.rank))
