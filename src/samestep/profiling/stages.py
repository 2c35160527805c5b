"""The stages of a profile: warm-up, measured steps without the profiler, traced steps, the end.

`Stages` is told of every step and every epoch of a training, and answers whether the profile has
all that it needs. It neither trains nor stops anything.

If a whole epoch has to be measured and takes longer than there is time for, some of its steps are
traced meanwhile and left out of what is measured. All ranks change stage after the same step: rank
0 decides, at steps that every rank knows beforehand.
"""

import math
from collections.abc import Callable
from typing import Literal

from torch import autograd

from samestep.profiling.time_account import MeasuredSpan, TimeAccount
from samestep.profiling.tracing import Tracer
from samestep.training.phases import Phases

_FIRST_DECISION, _GROWTH = 4, 1.25
_WARM_UP_S, _TRACE_S = 0.5, 0.5
_LEAST_TRACED, _MOST_TRACED = 5, 20
_LEAST_STEPS = 8
_LONGEST_S = 20.0
"""How long a profile waits for a whole epoch with what lies between it and the next."""


def profiler_runs() -> bool:
    """Whether any profiler of PyTorch's is on in this process."""
    return bool(autograd.profiler._is_profiler_enabled)  # noqa: SLF001 - there is no public name


class Stages:
    """Where the profile of this rank stands."""

    def __init__(
        self,
        account: TimeAccount,
        agree: Callable[[Callable[[], int]], int],
        *,
        seconds: float = 3.0,
        num_steps: int | None = None,
        epoch: int | None = None,
        wants_epochs: Callable[[], bool] = lambda: False,
        stop: Callable[[], bool] = lambda: False,
        new_tracer: Callable[[Phases], Tracer] = Tracer,
        own_profiler_runs: Callable[[], bool] = profiler_runs,
    ) -> None:
        """Begin to warm up.

        `agree` calls a function on rank 0, and returns its value on every rank. At least `seconds`
        are measured, or `num_steps` if they are given; `wants_epochs` says whether to measure a
        whole epoch, with what lies between it and the next. Traced is `epoch`, counted from 1, or
        by default a few steps. `stop` says whether to make do with what there is.
        """
        self.stage: Literal["warm-up", "measure", "trace", "done"] = "warm-up"
        self.span: MeasuredSpan | None = None
        """What was measured."""
        self.tracer: Tracer | None = None
        self.stopped = False
        """Whether the training ended before all was measured and traced."""
        self.profiled_itself = False
        """Whether the script had a profiler of its own on in some steps."""
        self._account, self._agree = account, agree
        self._seconds, self._epoch, self._wants_epochs = seconds, epoch, wants_epochs
        self._num_steps, self._stop = num_steps, stop
        self._new_tracer, self._own_profiler_runs = new_tracer, own_profiler_runs
        self._began = account.now()
        self._step = 0
        self._next_decision = _FIRST_DECISION
        self._trace_until = 0
        self._paused = False
        """Whether a profiler is on, or starting, that is not the tracer's."""

    @property
    def done(self) -> bool:
        """Whether the training is needed no more."""
        return self.stage == "done"

    def at(self, step: int) -> bool:
        """Take note that so many steps have been taken; return whether the profile is done."""
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
            self._decide_after_the_last_step()
        return self.done

    def epoch_begins(self, number: int) -> bool:
        """Take note that an epoch begins, counted from 1; return whether the profile is done."""
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
        """Take note that the script starts a profiler of its own: there can be only one."""
        if self._paused or self.done:
            return
        self.profiled_itself = self._paused = True
        if self.tracer is not None:
            self.tracer.stop()
        if self.stage != "trace" or self._epoch is not None:
            self._mark()
            self._account.epochs.clear()  # none that has begun until now is a whole one

    def end(self) -> None:
        """Make do with what there is: the training has ended by itself, or has to end."""
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
        """Count from here on, unless steps are slowed down by a profiler.

        Of an epoch that is to be traced the steps count: there may be no others.
        """
        traces = self.stage == "trace" and self._epoch is None
        self._account.mark(self._step, counts=not (self._paused or traces))

    def _decide_after_the_last_step(self) -> None:
        """Decide no later than when as many steps are measured as are wished for."""
        if self._num_steps is not None and self.stage == "measure":
            last = self._account.readings[0].step + self._num_steps
            if last > self._step:
                self._next_decision = min(self._next_decision, last)

    def _decide(self) -> None:
        if self.stage == "warm-up":
            if self._agree(self._is_warm):
                self.stage = "measure"
                self._account.restart(self._step)
        elif self._epoch is None and self._agree(self._is_enough):
            if self.tracer is not None:
                self._finish()
                return
            if self._agree(self._has_its_epochs):
                self._measure()
            self._begin_trace()

    def _is_warm(self) -> bool:
        return self._epoch is not None or self._account.now() - self._began >= _WARM_UP_S

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
            self._trace_until = self._step + self._agree(self._steps_to_trace)
        elif self.stage == "measure":
            self._measure()
        is_warm, self.stage = self.stage == "measure", "trace"
        # What starts now is not the script's own profiler, and how long it takes is not measured.
        self._paused = True
        self._mark()
        self.tracer = self._new_tracer(self._account.phases())
        self.tracer.start()
        self._paused = False
        if is_warm:
            self._mark()
        else:
            self._account.restart(self._step)

    def _steps_to_trace(self) -> int:
        steps, seconds = self._account.passed(self._step)
        return min(_MOST_TRACED, max(_LEAST_TRACED, math.ceil(_TRACE_S * steps / seconds)))

    def _end_trace(self) -> None:
        """End the trace; go on measuring if that had been interrupted."""
        assert self.tracer is not None
        self._account.mark(self._step, counts=False)
        self.tracer.stop()
        if self.span is not None or self._epoch is not None:
            self._finish()
        else:
            self.stage = "measure"
            self._mark()

    def _finish(self) -> None:
        if self.span is None:
            self._measure()
        self.stage = "done"

    def _measure(self) -> None:
        """Add up what counts: whole epochs if there are any, else all since the warm-up."""
        whole = self._wants_epochs() and self._num_steps is None
        self.span = self._account.span(self._step, whole_epochs=whole)
