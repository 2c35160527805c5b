"""How many cores the threads of this process and its workers wanted, as Linux counts it."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

Clocks = dict[tuple[int, int], tuple[float, float]]
"""(process, thread) → seconds it has run, seconds it has waited in a queue for a core."""


def core_clocks() -> Clocks:
    """Return the clocks of all threads of this process and of its children.

    Elsewhere than on Linux there are none: nothing is known.
    """
    clocks: Clocks = {}
    own = os.getpid()
    children = (word for _, words in _of_threads(own, "children") for word in words)
    for pid in (own, *children):
        for thread, numbers in _of_threads(pid, "schedstat"):
            if len(numbers) == 3:
                clocks[pid, thread] = (numbers[0] / 1e9, numbers[1] / 1e9)
    return clocks


def _of_threads(pid: int, name: str) -> Iterator[tuple[int, list[int]]]:
    """Yield each thread of a process with the numbers in its file of that name."""
    for file in Path(f"/proc/{pid}/task").glob(f"*/{name}"):
        with contextlib.suppress(OSError):  # the thread has just ended
            yield int(file.parent.name), [int(word) for word in file.read_text().split()]


def cores_between(pairs: Sequence[tuple[Clocks, Clocks]], seconds: float) -> tuple[float, float]:
    """Return what lies between the readings of all pairs, which are so many seconds together.

    That is the cores that were wanted on average, by threads that ran and by those that waited to,
    and the seconds that one thread waited for a core: the one of this very process that waited
    longest.
    """
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
    return busy / seconds if seconds > 0 else 0.0, waited
