"""What a profile counts of a rank's time, by its own clocks and those that Linux has of threads."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from samestep.profiling.measured import MeasuredRank
from samestep.training.phases import Phases

Clocks = dict[tuple[int, int], tuple[float, float]]
"""(process, thread) → seconds it has run, seconds it has waited in a queue for a core."""


@dataclass(frozen=True)
class Reading:
    """All clocks of this rank at one moment."""

    step: int
    at: float
    phases: Mapping[str, float]
    """Seconds in each phase since the training began."""
    cores: Clocks
    counts: bool
    """Whether the time after it counts, or is left out."""


@dataclass(frozen=True, kw_only=True)
class MeasuredSpan:
    """The steps that count, and the time that they took."""

    steps: int
    seconds: float
    rank: MeasuredRank


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


class TimeAccount:
    """Readings in order; the time after each of them counts, or is left out."""

    def __init__(
        self,
        phases: Callable[[], Phases],
        *,
        now: Callable[[], float] = time.perf_counter,
        cores: Callable[[], Clocks] = core_clocks,
    ) -> None:
        self.phases = phases
        """Returns the lap timer: a script may go on with another one, once its device is known."""
        self.now = now
        self._cores = cores
        self.readings: list[Reading] = []
        self.epochs: list[int] = []
        """Which readings were taken where an epoch began."""

    def passed(self, step: int) -> tuple[int, float]:
        """Return the steps and the seconds since the first reading."""
        return step - self.readings[0].step, self.now() - self.readings[0].at

    def restart(self, step: int) -> None:
        """Forget all readings, and count from here on."""
        self.readings.clear()
        self.mark(step, counts=True)

    def mark(self, step: int, *, counts: bool) -> None:
        """Count from here on, or leave out what follows."""
        self.readings.append(self._read(step, counts=counts))

    def span(self, step: int, *, whole_epochs: bool) -> MeasuredSpan | None:
        """Add up what counts; return None if that is less than two steps.

        With `whole_epochs` count only from the first beginning of an epoch to the last, if there
        are two or more.
        """
        readings = [*self.readings, self._read(step, counts=False)]
        if whole_epochs and len(self.epochs) > 1:
            readings = readings[self.epochs[0] : self.epochs[-1] + 1]
        pieces = [(a, b) for a, b in pairwise(readings) if a.counts]
        steps = sum(b.step - a.step for a, b in pieces)
        if steps < 2:
            return None
        seconds = sum(b.at - a.at for a, b in pieces)
        names = {name: None for _, b in pieces for name in b.phases}
        wanted, waited = cores_between([(a.cores, b.cores) for a, b in pieces], seconds)
        phases = {
            name: sum(b.phases.get(name, 0.0) - a.phases.get(name, 0.0) for a, b in pieces) / steps
            for name in names
        }
        rank = MeasuredRank(phases=phases, starved=waited / steps, wanted_cores=wanted)
        return MeasuredSpan(steps=steps, seconds=seconds, rank=rank)

    def _read(self, step: int, *, counts: bool) -> Reading:
        phases = self.phases()
        phases.lap("other")
        return Reading(step, self.now(), phases.running(), self._cores(), counts)
