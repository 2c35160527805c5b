"""What a profile counts of a rank's time: readings of its clocks, and whether to count between."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from samestep.profiling.cores import Clocks, core_clocks, cores_between
from samestep.profiling.measured import MeasuredRank
from samestep.training.phases import Phases


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
    phases: dict[str, float]
    """Seconds in all of the steps."""
    wanted_cores: float
    starved: float
    """Seconds that a thread waited for a core."""

    def per_step(self) -> MeasuredRank:
        """Return this rank's numbers per step."""
        return MeasuredRank(
            phases={phase: seconds / self.steps for phase, seconds in self.phases.items()},
            starved=self.starved / self.steps,
            wanted_cores=self.wanted_cores,
        )


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

    @property
    def num_epochs(self) -> int:
        """Epochs that were counted from their first step to their last."""
        return max(0, len(self.epochs) - 1)

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
        if whole_epochs and self.num_epochs:
            readings = readings[self.epochs[0] : self.epochs[-1] + 1]
        pieces = [(a, b) for a, b in pairwise(readings) if a.counts]
        steps = sum(b.step - a.step for a, b in pieces)
        if steps < 2:
            return None
        seconds = sum(b.at - a.at for a, b in pieces)
        names = {name: None for _, b in pieces for name in b.phases}
        wanted, waited = cores_between([(a.cores, b.cores) for a, b in pieces], seconds)
        return MeasuredSpan(
            steps=steps,
            seconds=seconds,
            phases={
                name: sum(b.phases.get(name, 0.0) - a.phases.get(name, 0.0) for a, b in pieces)
                for name in names
            },
            wanted_cores=wanted,
            starved=waited,
        )

    def _read(self, step: int, *, counts: bool) -> Reading:
        phases = self.phases()
        phases.lap("other")
        return Reading(step, self.now(), phases.running(), self._cores(), counts)
