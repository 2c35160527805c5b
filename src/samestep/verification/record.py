"""An engine that takes a few steps of a training and keeps what each of them did."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from samestep.data.source import Source
from samestep.execution.session import NATIVE, Engine, Task
from samestep.run.records import Record
from samestep.training.between import checkpoint_name, evaluate_now, evaluate_work
from samestep.training.loop import rehearse
from samestep.training.meter import Meter
from samestep.training.work import State, Taken, Work, close_epoch, epoch_is_full
from samestep.verification.fingerprints import gradients_of, sample_marks, weights_of
from samestep.verification.trace import Trace


def recording(
    inner: Engine,
    trace: Trace,
    *,
    prepare: Callable[[nn.Module], None],
    saves_at: int | None = None,
    ends_at: int | None = None,
    evaluates: bool = False,
) -> Engine:
    """Return an engine that fills a trace.

    Args:
        inner: samestep's own engine, or another one, whose steps are not looked into.
        trace: what is filled.
        prepare: called with the model before anything is computed.
        saves_at: the one step whose checkpoint is kept; large ones take their time.
        ends_at: the step after which enough is known.
        evaluates: whether to evaluate before training too.
    """

    def drive(task: Task) -> None:
        work, state = task.work, task.state
        prepare(work.trainee.model)
        if evaluates:
            _evaluate_at_first(work, trace)
        if inner is NATIVE:
            _record_steps(task, trace, saves_at=saves_at, ends_at=ends_at)
        else:
            not_saved: Record = {"event": "not saved"}
            inner.drive(replace(task, write=lambda *_: not_saved))
        trace.weights[state.position.step] = weights_of(work.trainee.model)

    return Engine(wrap=inner.wrap, drive=drive)


def _record_steps(task: Task, trace: Trace, *, saves_at: int | None, ends_at: int | None) -> None:
    work, state = task.work, task.state
    meter = Meter(work, state)
    for taken in rehearse(work, state):
        step = state.position.step
        _look(work, taken, trace, step)
        for record in meter.count(taken):
            task.emit(record)
        if work.validation is not None and _evaluates(work, state):
            task.emit(evaluate_now(work, state, work.validation)[0])
        if step == saves_at:
            meter.settle()
            if epoch_is_full(work, state):
                close_epoch(work, state)
            task.emit(task.between.save(checkpoint_name(state), None))
        if step == ends_at:
            break
    state.stop_reason = "enough is known"


def _look(work: Work, taken: Taken, trace: Trace, step: int) -> None:
    block, model = taken.block, work.trainee.model
    if block is not None and block.weight:
        trace.samples[step] = sample_marks(block.inputs, block.targets)
    trace.gradients[step] = gradients_of(model)
    trace.weights[step] = weights_of(model)


def _evaluates(work: Work, state: State) -> bool:
    """Whether a training would evaluate now: as the settings say, after an epoch, at the end."""
    step, every = state.position.step, work.settings.eval_every_steps
    due = every is not None and step % every == 0
    return due or epoch_is_full(work, state) or step == work.plan.total_steps


def keep_record(trace: Trace, record: Record) -> None:
    """Keep what a record of the run says."""
    if record["event"] == "step":
        trace.losses[record["step"]] = record["loss"]
        if record["grad_norm"] is not None:
            trace.norms[record["step"]] = record["grad_norm"]
    if record["event"] == "evaluation":
        trace.evaluations[record["step"]] = _values(record)


def _values(record: Record) -> dict[str, float]:
    words = ("event", "split", "epoch", "step", "samples", "seconds")
    return {k: v for k, v in record.items() if k not in words and isinstance(v, float)}


def _evaluate_at_first(work: Work, trace: Trace) -> None:
    source = work.validation if work.validation is not None else work.train
    trace.evaluations[0] = _values(evaluate_work(work, _Marked(source, trace)))


class _Marked:
    """A source whose evaluated samples are marked."""

    def __init__(self, source: Source, trace: Trace) -> None:
        self._source, self._trace = source, trace

    def evaluation(self, batch_size: int) -> Iterator[tuple[Any, Any]]:
        for inputs, targets in self._source.evaluation(batch_size):
            self._trace.evaluated += sample_marks(inputs, targets)
            yield inputs, targets
