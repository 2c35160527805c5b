"""The stages of a profile: warm-up, measured steps without the profiler, traced steps, the end.

Where a whole epoch is measured that is longer than there is time for, some of its steps are traced
meanwhile, and are left out of what is measured.

All ranks change stage after the same step: rank 0 decides, at steps that all know beforehand.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import autograd

from samestep.profiling.cores import Clocks, Cores, between, core_clocks
from samestep.profiling.tracing import Tracer
from samestep.training.phases import Phases

_FIRST_DECISION, _GROWTH = 4, 1.25
_WARM_UP_S, _TRACE_S = 0.5, 0.5
_TRACED_STEPS = (5, 20)
_LEAST_STEPS = 8
_LONGEST_S = 20.0
"""So long a profile waits for a whole epoch, with what lies between two of them."""


class Finished(BaseException):
    """All stages are done."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The accounts at one moment."""

    step: int
    at: float
    phases: dict[str, float]
    clocks: Clocks


@dataclass(frozen=True, kw_only=True)
class Span:
    """What lies between two snapshots."""

    steps: int
    seconds: float
    phases: dict[str, float]
    """Seconds in all of its steps."""
    cores: Cores


@dataclass(kw_only=True)
class Stages:
    """Where a profile of this rank stands. It is told of every step and of every epoch."""

    phases: Phases
    agree: Callable[[Callable[[], bool]], bool]
    """Calls a function on rank 0, and returns what it said on every rank."""
    seconds: float = 3.0
    """How long to measure, at least."""
    epoch: int | None = None
    """Trace this epoch, counted from 1, from its first step to its last; else a few steps."""
    whole_epochs: Callable[[], bool] = lambda: False
    """Whether to measure a whole epoch, with what lies between it and the next."""
    tracer: Tracer | None = None
    span: Span | None = None
    """What was measured."""
    step: int = 0
    profiled_itself: bool = False
    """Whether the script had a profiler of its own on in some steps."""
    stage: str = "warm-up"
    _began: float = field(default_factory=time.perf_counter)
    _first: Snapshot | None = None
    _start: Snapshot | None = None
    _epochs: list[Snapshot] = field(default_factory=list)
    _next: int = _FIRST_DECISION
    _trace_until: int = 0
    _left_out: list[Snapshot] = field(default_factory=list)
    """Begin and end, in turns, of what is not to be measured: steps with a profiler."""
    _starts: bool = False
    _cut: bool = False
    """Whether the trace ended early, since the script began one of its own."""
    _paused: bool = False
    """Whether the script profiles itself."""

    @property
    def traced(self) -> int:
        """Steps that the trace holds."""
        return self.tracer.steps if self.tracer is not None else 0

    def at(self, step: int) -> None:
        """Take note that so many steps have been taken.

        Raises:
            Finished: all is measured.
        """
        self.step = step
        self._resume()
        if self._first is None and step:
            self._first = self._snapshot()
        if self.stage == "trace":
            assert self.tracer is not None
            if not self._cut:
                self.tracer.step()
            if self.epoch is None and step >= self._trace_until:
                self._traced_enough()
        elif step >= self._next:
            self._next = max(step + 1, int(step * _GROWTH))
            self._decide()

    def epoch_begins(self, number: int) -> None:
        """Take note that an epoch begins, counted from 1.

        Raises:
            Finished: all is measured.
        """
        self._resume()
        if self.stage == "measure" and not self._paused:
            self._epochs.append(self._snapshot())
        if self.epoch is None or self.stage == "done":
            return
        if self.stage == "trace" and number > self.epoch:
            self._finish()
        elif self.stage != "trace" and number == self.epoch:
            if self._paused:
                raise Finished
            self._begin_trace()

    def script_profiles(self) -> None:
        """Take note that the script starts a profiler of its own: there can be only one."""
        if self._starts or self._paused or self.stage == "done":
            return
        self.profiled_itself = self._paused = True
        if self.stage == "trace" and self.tracer is not None:
            self.tracer.stop()
            self._cut = True
            if self._in_trace():
                return
        self.phases.lap("other")
        self._left_out.append(self._snapshot())
        self._epochs.clear()

    def _resume(self) -> None:
        """Measure again once the script's own profiler is off, and its trace written."""
        if self._paused and not autograd.profiler._is_profiler_enabled:  # noqa: SLF001
            self._paused = False
            if not self._in_trace():
                self._left_out.append(self._snapshot())

    def _in_trace(self) -> bool:
        """Whether the steps of a trace are being left out already."""
        return self.stage == "trace" and len(self._left_out) % 2 == 1

    def end(self) -> None:
        """Make do with what there is: the training has ended by itself."""
        if self.stage == "trace" and self.tracer is not None:
            self._end_trace()
        elif self._paused:
            self._left_out.append(self._snapshot())
        if self.span is None:
            self._measure()
        self.stage = "done"

    def _decide(self) -> None:
        if self.stage == "warm-up":
            if self.agree(self._is_warm):
                self.stage, self._start = "measure", self._snapshot()
        elif self.stage == "measure" and self.epoch is None and self.agree(self._is_enough):
            if self.tracer is not None:
                self._finish()
            if self.agree(self._has_its_epochs):
                self._measure()
            self._begin_trace()

    def _is_warm(self) -> bool:
        return self.epoch is not None or time.perf_counter() - self._began >= _WARM_UP_S

    def _is_enough(self) -> bool:
        assert self._start is not None
        if self._paused:
            return False
        seconds = time.perf_counter() - self._start.at
        if self.step - self._start.step < _LEAST_STEPS or seconds < self.seconds:
            return False
        return self.tracer is None or self._has_its_epochs()

    def _has_its_epochs(self) -> bool:
        assert self._start is not None
        if not self.whole_epochs() or len(self._epochs) > 1:
            return True
        return time.perf_counter() - self._start.at >= max(_LONGEST_S, self.seconds)

    def _begin_trace(self) -> None:
        if self._start is not None and self.epoch is not None:
            self._measure()
        if self.epoch is None:
            now = self._snapshot()
            assert self._start is not None
            if self.span is None:
                self._left_out.append(now)
            each = (now.at - self._start.at) / (now.step - self._start.step)
            few, many = (self.step + count for count in _TRACED_STEPS)
            self._trace_until = few
            while self._trace_until < many and self.agree(
                lambda: (self._trace_until - self.step) * each < _TRACE_S
            ):
                self._trace_until += 1
        self.stage, self.tracer = "trace", Tracer(self.phases)
        self._starts, self._cut = True, False
        self.tracer.start()
        self._starts = False
        self._start = self._start or self._snapshot()

    def _traced_enough(self) -> None:
        if self.span is not None:
            self._finish()
        self._end_trace()
        self.stage = "measure"

    def _end_trace(self) -> None:
        assert self.tracer is not None
        if not self._cut:
            self.tracer.stop()
        self.phases.lap("other")
        if self._in_trace():
            self._left_out.append(self._snapshot())

    def _finish(self) -> None:
        self.end()
        raise Finished

    def _measure(self) -> None:
        """Measure up to here: whole epochs if there are any, else from the end of the warm-up."""
        start, end = self._start or self._first, self._snapshot()
        if self.whole_epochs() and len(self._epochs) > 1:
            start, end = self._epochs[0], self._epochs[-1]
        if start is not None:
            span = _between(start, end, self._left_out)
            self.span = span if span.steps >= 2 else None

    def _snapshot(self) -> Snapshot:
        return Snapshot(
            step=self.step,
            at=time.perf_counter(),
            phases=self.phases.running(),
            clocks=core_clocks(),
        )


def _between(start: Snapshot, end: Snapshot, left_out: Sequence[Snapshot]) -> Span:
    """Return what lies between two snapshots, without what lies between pairs of others."""
    pieces = []
    for a, b in zip(left_out[::2], left_out[1::2], strict=True):
        if start.at < b.at and a.at < end.at:
            pieces.append((start, a))
            start = b
    pieces = [(a, b) for a, b in [*pieces, (start, end)] if a.at < b.at]
    seconds = sum(b.at - a.at for a, b in pieces)
    cores = [(b.at - a.at, between(a.clocks, b.clocks, b.at - a.at)) for a, b in pieces]
    names = {name: None for _, b in pieces for name in b.phases}
    return Span(
        steps=sum(b.step - a.step for a, b in pieces),
        seconds=seconds,
        phases={
            name: sum(b.phases.get(name, 0.0) - a.phases.get(name, 0.0) for a, b in pieces)
            for name in names
        },
        cores=Cores(
            wanted=sum(part * one.wanted for part, one in cores) / max(seconds, 1e-9),
            waited=sum(one.waited for _, one in cores),
        ),
    )
