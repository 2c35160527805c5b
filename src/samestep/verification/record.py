"""An engine that takes the steps of another and keeps what each of them did."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

from samestep.data.batches import Source
from samestep.data.blocks import Block
from samestep.execution.session import Engine, Task
from samestep.run.records import Record
from samestep.training.evaluation import evaluate
from samestep.training.loop import Job, evaluation_batch
from samestep.training.step import EagerStep, StepResult
from samestep.verification.fingerprints import gradients_of, sample_marks, weights_of
from samestep.verification.trace import Trace


def recording(
    inner: Engine,
    trace: Trace,
    *,
    prepare: Callable[[Job], None],
    saves_at: int | None = None,
    ends_at: int | None = None,
    evaluates: bool = False,
) -> Engine:
    """Return an engine that fills a trace while another one drives.

    Args:
        inner: what takes the steps.
        trace: what is filled.
        prepare: called with the job before anything is computed.
        saves_at: the one step whose checkpoint is kept; large ones take their time.
        ends_at: the step at which a checkpoint is due, after which enough is known.
        evaluates: whether to evaluate before training too.
    """

    def drive(task: Task) -> None:
        job = task.job
        prepare(job)
        if evaluates:
            _evaluate_at_first(job, trace)
        job.step = cast("EagerStep", _Step(job, trace))
        save = job.save

        def save_once(job: Job, name: str, metric: float | None) -> Record:
            if job.position.step == saves_at:
                return save(job, name, metric)
            if job.position.step == ends_at:
                job.stop_reason = "enough is known"
            return _not_saved(job)

        job.save = save_once
        inner.drive(replace(task, write=lambda *_: _not_saved(job)))
        trace.weights[job.position.step] = weights_of(job.trainee.model)

    return Engine(wrap=inner.wrap, drive=drive)


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


def _not_saved(job: Job) -> Record:
    return {"event": "not saved", "step": job.position.step}


def _evaluate_at_first(job: Job, trace: Trace) -> None:
    source = job.validation if job.validation is not None else job.train
    counted = _Counted(source, trace)
    values = evaluate(
        job.trainee.model,
        cast("Source", counted),
        job.trainee.loss,
        job.metrics,
        world=job.world,
        batch_size=evaluation_batch(job.plan.batch_size),
        precision=job.settings.precision,
    )
    trace.evaluations[0] = {k: v for k, v in values.items() if isinstance(v, float)}


class _Counted:
    """A source whose evaluated samples are marked."""

    def __init__(self, source: Source, trace: Trace) -> None:
        self._source, self._trace = source, trace

    def evaluation(self, batch_size: int) -> Iterator[tuple[Any, Any]]:
        for inputs, targets in self._source.evaluation(batch_size):
            self._trace.evaluated += sample_marks(inputs, targets)
            yield inputs, targets


class _Step:
    """What takes the steps of a job, and is looked at after each."""

    def __init__(self, job: Job, trace: Trace) -> None:
        self._inner, self._model, self._trace = job.step, job.trainee.model, trace
        self.steps_per_call = job.step.steps_per_call

    @property
    def notes(self) -> list[Record]:
        return self._inner.notes

    def __call__(self, block: Block, step: int, lrs: list[float], *, want_norm: bool) -> StepResult:
        if block.weight:
            self._trace.samples[step + 1] = sample_marks(block.inputs, block.targets)
        result = self._inner(block, step, lrs, want_norm=want_norm)
        self._trace.gradients[step + 1] = gradients_of(self._model)
        self._trace.weights[step + 1] = weights_of(self._model)
        return result
