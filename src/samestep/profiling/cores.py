"""How many cores the threads of this process and its workers wanted, as Linux counts it."""

import os
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


def between(before: Clocks, after: Clocks, seconds: float) -> Cores:
    """Return what lies between two readings that are so many seconds apart."""
    own = os.getpid()
    busy = longest = 0.0
    for key, (ran, waited) in after.items():
        earlier = before.get(key, (0.0, 0.0))
        busy += ran - earlier[0] + waited - earlier[1]
        if key[0] == own:
            longest = max(longest, waited - earlier[1])
    return Cores(wanted=busy / seconds if seconds > 0 else 0.0, waited=longest)
