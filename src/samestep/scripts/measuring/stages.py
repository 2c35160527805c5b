"""The stages of a profile: warm-up, measured steps without the profiler, traced steps, the end.

`Stages` learns of every step and every epoch of a training, and answers whether the profile has
all that it needs. It neither trains nor stops anything. `TimeAccount` adds up the time that counts.

If a whole epoch has to be measured and takes too long, some of its steps are traced meanwhile and
left out of what is measured. All ranks change stage after the same step: rank 0 decides, at steps
that every rank knows beforehand.
"""

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal

from torch import autograd

from samestep.base.phases import Phases
from samestep.launch.ranks import watched
from samestep.scripts.measuring.measured import Extent, MeasuredRank
from samestep.scripts.measuring.tracing import Tracer

_FIRST_DECISION, _GROWTH = 4, 1.25
_WARM_UP_S, _TRACE_S = 0.5, 0.5
_LEAST_TRACED, _MOST_TRACED = 5, 20
_LEAST_STEPS = 8
_LONGEST_S = 20.0
"""How long a profile waits for a whole epoch with what lies between it and the next."""

Clocks = dict[tuple[int, int], tuple[float, float]]
"""(process, thread) → seconds it has run, seconds it has waited for a core."""


@dataclass(frozen=True)
class ClockReading:
    """All clocks of this rank at one moment."""

    step: int
    at: float
    phases: Mapping[str, float]  # seconds in each phase since the training began
    cores: Clocks
    counts: bool  # whether the time after it counts


@dataclass(frozen=True, kw_only=True)
class MeasuredSpan:
    """The steps that count, and the time that they took."""

    steps: int
    seconds: float
    rank: MeasuredRank


class TimeAccount:
    """Readings in order; the time after each of them counts, or is left out."""

    def __init__(
        self,
        phases: Callable[[], Phases],
        *,
        now: Callable[[], float] = time.perf_counter,
        cores: Callable[[], Clocks] | None = None,
    ) -> None:
        self.phases = phases  # returns the lap timer; a script's changes once its device is known
        self.now = now
        self._cores = cores or core_clocks
        self.readings: list[ClockReading] = []
        self.epochs: list[int] = []  # which readings were taken where an epoch began

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
        """Add up what counts, of whole epochs only if asked; None for less than two steps.

        Epochs nearly all of whose steps were traced do not tell: then all that counts is added up.
        """
        readings = [*self.readings, self._read(step, counts=False)]
        pieces = [(a, b) for a, b in pairwise(readings) if a.counts]
        if whole_epochs and len(self.epochs) > 1:
            between = pairwise(readings[self.epochs[0] : self.epochs[-1] + 1])
            complete = [(a, b) for a, b in between if a.counts]
            pieces = complete if _num_steps(complete) >= _LEAST_STEPS else pieces
        steps = _num_steps(pieces)
        if steps < 2:
            return None
        seconds = sum(b.at - a.at for a, b in pieces)
        names = {name: None for _, b in pieces for name in b.phases}
        wanted, waited = _cores_between([(a.cores, b.cores) for a, b in pieces], seconds)
        phases = {
            name: sum(b.phases.get(name, 0.0) - a.phases.get(name, 0.0) for a, b in pieces) / steps
            for name in names
        }
        rank = MeasuredRank(phases=phases, starved=waited / steps, wanted_cores=wanted)
        return MeasuredSpan(steps=steps, seconds=seconds, rank=rank)

    def _read(self, step: int, *, counts: bool) -> ClockReading:
        phases = self.phases()
        phases.lap("other")
        return ClockReading(step, self.now(), phases.running(), self._cores(), counts)


def _num_steps(pieces: Sequence[tuple[ClockReading, ClockReading]]) -> int:
    return sum(after.step - before.step for before, after in pieces)


def core_clocks() -> Clocks:
    """Return the clocks of all threads of this process and its children; empty except on Linux."""
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


def _cores_between(pairs: Sequence[tuple[Clocks, Clocks]], seconds: float) -> tuple[float, float]:
    """Return the cores used or waited for on average, and the most delayed thread's wait in s."""
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


def profiler_runs() -> bool:
    """Whether any profiler of PyTorch's is on in this process."""
    return bool(autograd.profiler._is_profiler_enabled)  # noqa: SLF001 - there is no public name


class Stages:
    """The stage of this rank's profile."""

    def __init__(
        self,
        account: TimeAccount,
        agree: Callable[[Callable[[], int]], int],
        extent: Extent,
        *,
        wants_epochs: Callable[[], bool] = lambda: False,
        stop: Callable[[], bool] = lambda: False,
        new_tracer: Callable[..., Tracer] = Tracer,
        own_profiler_runs: Callable[[], bool] = profiler_runs,
    ) -> None:
        """Begin to warm up.

        `agree` calls a function on rank 0 and returns its value on every rank. `wants_epochs` says
        whether to measure a whole epoch, with what lies between it and the next; `stop`, whether to
        end with what there is.
        """
        self.stage: Literal["warm-up", "measure", "trace", "done"] = "warm-up"
        self.span: MeasuredSpan | None = None
        self.tracer: Tracer | None = None
        self.stopped = False  # whether the training ended before all was measured and traced
        self.profiled_itself = False
        """Whether the script had a profiler of its own on in some steps."""
        self._account, self._agree = account, agree
        self._seconds, self._epoch, self._num_steps = extent.seconds, extent.epoch, extent.steps
        self._wants_epochs, self._stop = wants_epochs, stop
        self._new_tracer = partial(
            new_tracer, record_shapes=extent.record_shapes, with_stack=extent.with_stack
        )
        self._own_profiler_runs = own_profiler_runs
        self._began = account.now()
        self._step = 0
        self._next_decision = _FIRST_DECISION
        self._trace_until = 0
        self._paused = False  # whether a profiler other than the tracer is on, or starting

    @property
    def done(self) -> bool:
        """Whether the profile is complete."""
        return self.stage == "done"

    def at(self, step: int) -> bool:
        """Note the number of steps taken; return whether the profile is done."""
        watched.step(step)
        taken, self._step = step - self._step, step
        self._resume()
        if step and not self._account.readings:
            self._mark()
        if self.stage == "trace" and self.tracer is not None:
            self.tracer.step(taken)
            if self._epoch is None and step >= self._trace_until:
                self._end_trace()
        if step >= self._next_decision and not self.done:
            self._next_decision = max(step + 1, int(step * _GROWTH))
            if self._agree(self._stop):
                self.end()
            elif self.stage != "trace":
                self._decide()
            if self._num_steps is not None and self.stage == "measure":
                last = self._account.readings[0].step + self._num_steps
                if last > self._step:  # decide no later than after the last of them
                    self._next_decision = min(self._next_decision, last)
        return self.done

    def epoch_begins(self, number: int) -> bool:
        """Note that an epoch begins, counted from 1; return whether the profile is done."""
        self._resume()
        if self.stage == "measure" and not self._paused:
            self._account.epochs.append(len(self._account.readings))
            self._account.mark(self._step, counts=True)
        if self.stage == "trace" and self._epoch is not None and number > self._epoch:
            self._end_trace()
        elif self.stage in ("warm-up", "measure") and number == self._epoch:
            if self._paused:
                self.stage = "done"  # there can be only one profiler: no trace
            else:
                self._begin_trace()
        return self.done

    def script_profiles(self) -> None:
        """Note that the script starts a profiler of its own: there can be only one."""
        if self._paused or self.done:
            return
        self.profiled_itself = self._paused = True
        if self.tracer is not None:
            self.tracer.stop()
        if self.stage != "trace" or self._epoch is not None:
            self._mark()
            self._account.epochs.clear()  # the epoch so far is not a whole one

    def end(self) -> None:
        """End with what there is: the training has ended by itself, or has to."""
        self.stopped = True
        if self.stage == "trace":
            self._end_trace()
        self._finish()

    def _resume(self) -> None:
        """Count again once the script's own profiler is off, and its trace written."""
        if self._paused and not self._own_profiler_runs():
            self._paused = False
            self._mark()

    def _mark(self) -> None:
        """Count from here on, unless a profiler slows the steps down."""
        # The steps of an epoch that is to be traced do count: there may be no others.
        traces = self.stage == "trace" and self._epoch is None
        self._account.mark(self._step, counts=not (self._paused or traces))

    def _decide(self) -> None:
        if self.stage == "warm-up":
            warm_at = self._began + _WARM_UP_S
            if self._agree(lambda: self._epoch is not None or self._account.now() >= warm_at):
                self.stage = "measure"
                self._account.restart(self._step)
        elif self._epoch is None and self._agree(self._is_enough):
            if self.tracer is not None:
                self._finish()
                return
            if self._agree(self._has_its_epochs):
                self._measure()
            self._begin_trace()

    def _is_enough(self) -> bool:
        steps, seconds = self._account.passed(self._step)
        if self._num_steps is not None:
            return not self._paused and steps >= self._num_steps
        if self._paused or steps < _LEAST_STEPS or seconds < self._seconds:
            return False
        return self.tracer is None or self._has_its_epochs()

    def _has_its_epochs(self) -> bool:
        _, seconds = self._account.passed(self._step)
        too_long = seconds >= max(_LONGEST_S, self._seconds)
        wants = self._wants_epochs() and self._num_steps is None
        return not wants or len(self._account.epochs) > 1 or too_long

    def _begin_trace(self) -> None:
        if self._epoch is None:
            steps, seconds = self._account.passed(self._step)
            number = math.ceil(_TRACE_S * steps / seconds)
            number = min(_MOST_TRACED, max(_LEAST_TRACED, number))
            self._trace_until = self._step + self._agree(lambda: number)
        elif self.stage == "measure":
            self._measure()
        is_warm, self.stage = self.stage == "measure", "trace"
        # This is not the script's own profiler, and its start is not measured.
        self._paused = True
        self._mark()
        self.tracer = self._new_tracer(self._account.phases())
        self.tracer.start()
        self._paused = False
        if is_warm:
            self._mark()
        else:
            self._account.restart(self._step)

    def _end_trace(self) -> None:
        assert self.tracer is not None
        watched.turn_to(watched.END)  # a trace may take minutes; the next step ends that
        self._account.mark(self._step, counts=False)
        self.tracer.stop()
        self.stage = "measure"
        if self.span is not None or self._epoch is not None:
            self._finish()
        else:
            self._mark()

    def _finish(self) -> None:
        if self.span is None:
            self._measure()
        self.stage = "done"

    def _measure(self) -> None:
        """Add up what counts: whole epochs, if any, else all since the warm-up."""
        whole = self._wants_epochs() and self._num_steps is None
        self.span = self._account.span(self._step, whole_epochs=whole)
