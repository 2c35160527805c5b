"""An engine that takes a few steps of a training and keeps what each of them did."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import nn

from samestep.data.blocks import Batch
from samestep.data.source import Source
from samestep.run.records import Record
from samestep.session.training_run import NATIVE, Engine, Task
from samestep.training.loop import evaluate_now, evaluate_work, rehearse
from samestep.training.meter import Meter, epoch_record
from samestep.training.work import State, Work, close_epoch, epoch_is_full
from samestep.verification.fingerprints import bits_of, gradients_of, sample_marks, weights_of
from samestep.verification.short_trainings import ShortTraining
from samestep.verification.trace import Trace


def recording(
    training: ShortTraining, stop: int, trace: Trace, prepare: Callable[[nn.Module], None]
) -> Engine:
    """Return an engine that fills a trace; Lightning's own steps are not looked into.

    A short training ends with the step `stop`, whose checkpoint alone is kept. `prepare` is called
    with the model before anything is computed.
    """
    inner = NATIVE
    if training.lightning:
        from samestep.lightning.engine import LIGHTNING  # noqa: PLC0415 - an extra

        inner = LIGHTNING

    def drive(task: Task) -> None:
        work, state = task.work, task.state
        prepare(work.learner.model)
        if training.lightning:
            not_saved: Record = {"event": "not saved"}
            inner.drive(replace(task, write=lambda *_: not_saved))
        else:
            if training.evaluates:
                source = work.validation if work.validation is not None else work.train
                collated = task.request.recipe.collate is not None
                trace.evaluations[0] = _values(
                    evaluate_work(work, _Marked(source, trace, collated=collated))
                )
            _record_steps(task, trace, training, stop)
        trace.weights[state.position.step] = weights_of(work.learner.model)

    return Engine(wrap=inner.wrap, drive=drive)


def _record_steps(task: Task, trace: Trace, training: ShortTraining, stop: int) -> None:
    work, state = task.work, task.state
    meter, model = Meter(work, state), work.learner.model
    trace.begun = state.position.step + 1
    for taken in rehearse(work, state):
        step, block = state.position.step, taken.block
        if block is not None and block.weight:
            # What is collated is known by its places in the data.
            trees = (block.inputs,) if block.parts else (block.inputs, block.targets)
            trace.samples[step] = sample_marks(*trees)
        trace.gradients[step], trace.weights[step] = gradients_of(model), weights_of(model)
        if work.settings.virtual_ranks:
            trace.bits[step] = bits_of(model)
        for record in meter.count(taken):
            task.emit(record)
        if work.settings.virtual_ranks and epoch_is_full(work, state):
            meter.settle()
            task.emit(epoch_record(work, state))
        if work.validation is not None and _evaluates(work, state):
            task.emit(evaluate_now(work, state, work.validation)[0])
        if step == stop and training.saves:
            meter.settle()
            if epoch_is_full(work, state):
                close_epoch(work, state)
            task.emit(task.control.save(None))
        if step == stop and training.short:
            break
        trace.begun = step + 1
    state.stop_reason = "enough is known"


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
    if record["event"] == "epoch":
        metrics = record.get("metrics", {})
        trace.epochs[record["step"]] = {"loss": record["loss"], **metrics}
    if record["event"] == "evaluation":
        trace.evaluations[record["step"]] = _values(record)


def _values(record: Record) -> dict[str, float]:
    words = ("event", "split", "epoch", "step", "samples", "seconds")
    return {k: v for k, v in record.items() if k not in words and isinstance(v, float)}


class _Marked:
    """A source whose evaluated samples are marked."""

    def __init__(self, source: Source, trace: Trace, *, collated: bool) -> None:
        self._source, self._trace, self._collated = source, trace, collated

    def evaluation(self, batch_size: int) -> Iterator[Batch]:
        for batch in self._source.evaluation(batch_size):
            if self._collated:
                self._trace.evaluated += map(str, range(batch.first, batch.first + batch.samples))
            else:
                self._trace.evaluated += sample_marks(batch.inputs, batch.targets)
            yield batch
