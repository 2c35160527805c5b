"""How many cores the threads of this process and its workers wanted, as Linux counts it."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
Clocks = dict[tuple[int, int], tuple[float, float]]
"""(process, thread) → seconds it has run, seconds it has waited in a queue for a core."""


@dataclass(frozen=True, kw_only=True)
class Cores:
    """What lies between two readings of the clocks."""

    wanted: float
    """Cores that were wanted on average: by threads that ran, and by those that waited to."""
    waited: float
    """Seconds that the thread waited for a core that waited longest, of this very process."""


def core_clocks() -> Clocks:
    """Return the clocks of all threads of this process and of its children.

    Elsewhere than on Linux there are none: nothing is known.
    """
    own = os.getpid()
    return {key: clock for pid in (own, *_children(own)) for key, clock in _threads(pid)}


def _threads(pid: int) -> list[tuple[tuple[int, int], tuple[float, float]]]:
    found = []
    for file in (_PROC / str(pid) / "task").glob("*/schedstat"):
        try:
            ran, waited, _ = file.read_text().split()
        except (OSError, ValueError):
            continue  # the thread has just ended
        found.append(((pid, int(file.parent.name)), (int(ran) / 1e9, int(waited) / 1e9)))
    return found


def _children(pid: int) -> list[int]:
    found = []
    for file in (_PROC / str(pid) / "task").glob("*/children"):
        try:
            found += [int(word) for word in file.read_text().split()]
        except OSError:
            continue
    return found


def cores_between(pairs: Sequence[tuple[Clocks, Clocks]], seconds: float) -> Cores:
    """Return what lies between the readings of all pairs, which are so many seconds together."""
    own = os.getpid()
    busy = waited = 0.0
    for before, after in pairs:
        longest = 0.0
        for thread, (ran_s, waited_s) in after.items():
            ran_before, waited_before = before.get(thread, (0.0, 0.0))
            busy += ran_s - ran_before + waited_s - waited_before
            if thread[0] == own:
                longest = max(longest, waited_s - waited_before)
        waited += longest
    return Cores(wanted=busy / seconds if seconds > 0 else 0.0, waited=waited)
