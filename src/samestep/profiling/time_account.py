"""What a profile counts of a rank's time: readings of its clocks, and whether to count between."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from samestep.profiling.cores import Clocks, Cores, core_clocks, cores_between
from samestep.profiling.measured import MeasuredRank
from samestep.profiling.tracing import Traced
from samestep.training.phases import Phases


@dataclass(frozen=True, kw_only=True)
class Reading:
    """All clocks of this rank at one moment."""

    step: int
    at: float
    phases: Mapping[str, float]
    """Seconds in each phase since the training began."""
    cores: Clocks


@dataclass(frozen=True, kw_only=True)
class MeasuredSpan:
    """The steps that count, and the time that they took."""

    steps: int
    seconds: float
    phases: dict[str, float]
    """Seconds in all of the steps."""
    cores: Cores

    def per_step(self, traced: Traced | None) -> MeasuredRank:
        """Return this rank's numbers per step, with those of its trace if it has one."""
        return MeasuredRank(
            phases={phase: seconds / self.steps for phase, seconds in self.phases.items()},
            operations=traced.operations if traced is not None else None,
            starved=self.cores.waited / self.steps,
            wanted_cores=self.cores.wanted,
            memory=traced.memory if traced is not None else None,
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
        self._readings: list[tuple[Reading, bool]] = []
        self._epochs: list[int] = []
        """Which readings were taken where an epoch began."""

    @property
    def is_empty(self) -> bool:
        """Whether there is no reading yet."""
        return not self._readings

    @property
    def num_epochs(self) -> int:
        """Epochs that were counted from their first step to their last."""
        return max(0, len(self._epochs) - 1)

    def passed(self, step: int) -> tuple[int, float]:
        """Return the steps and the seconds since the first reading."""
        first, _ = self._readings[0]
        return step - first.step, self.now() - first.at

    def restart(self, step: int) -> None:
        """Forget all readings, and count from here on."""
        self._readings.clear()
        self.mark(step, counts=True)

    def mark(self, step: int, *, counts: bool) -> None:
        """Count from here on, or leave out what follows."""
        self._readings.append((self._read(step), counts))

    def begin_epoch(self, step: int) -> None:
        """Count from here on, where an epoch begins."""
        self._epochs.append(len(self._readings))
        self.mark(step, counts=True)

    def forget_epochs(self) -> None:
        """Take no epoch that has begun until now for a whole one."""
        self._epochs.clear()

    def span(self, step: int, *, whole_epochs: bool) -> MeasuredSpan | None:
        """Add up what counts; return None if that is less than two steps.

        Args:
            step: how many steps have been taken by now.
            whole_epochs: count only from the first beginning of an epoch to the last, if there are
                two or more.
        """
        readings = [*self._readings, (self._read(step), False)]
        if whole_epochs and self.num_epochs:
            readings = readings[self._epochs[0] : self._epochs[-1] + 1]
        pieces = [(a, b) for (a, counts), (b, _) in pairwise(readings) if counts]
        steps = sum(b.step - a.step for a, b in pieces)
        if steps < 2:
            return None
        seconds = sum(b.at - a.at for a, b in pieces)
        names = {name: None for _, b in pieces for name in b.phases}
        return MeasuredSpan(
            steps=steps,
            seconds=seconds,
            phases={
                name: sum(b.phases.get(name, 0.0) - a.phases.get(name, 0.0) for a, b in pieces)
                for name in names
            },
            cores=cores_between([(a.cores, b.cores) for a, b in pieces], seconds),
        )

    def _read(self, step: int) -> Reading:
        phases = self.phases()
        phases.lap("other")
        return Reading(step=step, at=self.now(), phases=phases.running(), cores=self._cores())
