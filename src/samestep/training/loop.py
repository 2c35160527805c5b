"""The training loop: it yields records, and whoever calls it does with them what it likes."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from signal import Signals
from typing import Any

import torch
from torch import Tensor

from samestep.data.batches import Source
from samestep.data.blocks import Block
from samestep.errors import UserError
from samestep.run import Record
from samestep.settings import Settings
from samestep.training.evaluate import evaluate
from samestep.training.parallel import share_buffers
from samestep.training.plan import Plan, learning_rate
from samestep.training.step import EagerStep, StepResult, Trainee
from samestep.training.stopping import NOTHING, Agreed, Agreement, Watch
from samestep.training.window import REMEDIES, Window
from samestep.world import World

_PROGRESS_EVERY_S = 0.2


@dataclass(kw_only=True)
class Position:
    """Where the training stands: saved in each checkpoint, and resuming goes on from it."""

    step: int = 0
    """Optimizer steps taken."""
    epoch: int = 0
    """Epochs finished, their evaluation included."""
    step_in_epoch: int = 0
    samples: int = 0
    """Samples trained."""
    seconds: float = 0.0
    """Seconds spent in training steps, over all attempts."""
    epoch_started_s: float = 0.0
    """The value of `seconds` when the running epoch began."""


@dataclass(kw_only=True)
class Job:
    """All that the loop needs, built, and where it stands."""

    settings: Settings
    plan: Plan
    world: World
    trainee: Trainee
    step: EagerStep
    train: Source
    validation: Source | None
    metrics: Mapping[str, Callable[[Any, Any], Tensor]]
    agreement: Agreement
    watch: Watch
    save: Callable[["Job", str, float | None], Record]
    """(job, file name, monitored metric) → its `checkpoint` record, once it is announced."""
    classes: tuple[str, ...] = ()
    """Names of the classes, if the data has them."""
    position: Position = field(default_factory=Position)
    loss_sum: float = 0.0
    """This rank's part of the sum of the sample losses of the running epoch."""
    stop_reason: str = ""
    signum: int = 0


def train(job: Job) -> Iterator[Record]:
    """Train until the plan is done or a reason to stop is agreed; yield what happened.

    Yields:
        Records named `step`, `epoch`, `evaluation` and `checkpoint`, as events.jsonl keeps them,
        and `progress`, which only moves a progress bar. Afterwards `job.stop_reason` says why it
        ended.

    Raises:
        UserError: the loss became NaN or infinite, or a checkpoint could not be written.
    """
    job.trainee.model.train()
    job.agreement.start(job.position.step)
    _stop_early(job)  # a resumed run may have stopped for that reason
    if job.stop_reason:
        return
    while job.position.step < job.plan.total_steps or _epoch_is_full(job):
        yield from _steps(job)
        if not job.stop_reason:
            yield from _end_of_epoch(job)
        if job.stop_reason:
            return
    job.stop_reason = "finished"


def _epoch_is_full(job: Job) -> bool:
    return job.position.step_in_epoch == job.plan.steps_per_epoch


def _steps(job: Job) -> Iterator[Record]:
    """Take the remaining steps of the running epoch."""
    plan, settings = job.plan, job.settings
    window = Window(job.world, job.loss_sum)
    clock = _Clock(job.position)
    position, dues = job.position, _dues(settings)
    for piece in _pieces(job):
        before = position.step
        after = before + piece.num_steps
        lrs = [learning_rate(plan, settings, step) for step in range(before, after)]
        logged = [s for s in range(before + 1, after + 1) if s % settings.log_every == 0]
        result = job.step(piece, before, lrs, want_norm=bool(logged))
        while job.step.notes:
            note = job.step.notes.pop(0)
            clock.leave_out(note["seconds"])
            yield note
        window.add(before, result.losses, piece.global_size)
        position.step = after
        position.step_in_epoch += piece.num_steps
        position.samples += piece.num_steps * piece.global_size
        if logged or window.full:
            losses = window.read(logged, lrs[-1])
            yield from _step_records(job, clock, logged, losses, result, lrs)
        if clock.shows():
            yield {"event": "progress", "step": after, "samples": position.samples,
                   **clock.rate(position)}  # fmt: skip
        agreed = job.agreement.after(after)
        if agreed is not NOTHING or any(after % due == 0 for due in dues):
            yield from _between_steps(job, agreed, window, clock, lrs[-1])
            if job.stop_reason:
                return
    window.read([], learning_rate(plan, settings, job.position.step - 1))
    _settle(job, window, clock)


def _pieces(job: Job) -> Iterator[Block]:
    """Yield blocks as long as the step takes at once, cut where something falls due.

    The cuts depend on the position alone, so a resumed run groups its steps as if never stopped.
    """
    settings, most = job.settings, job.step.steps_per_call
    dues = _dues(settings)
    for block in job.train.blocks(
        job.position.epoch,
        job.position.step_in_epoch,
        global_batch=job.plan.global_batch_size,
        drop_last=settings.drop_last,
    ):
        if most == 1:
            for piece in block.singles():
                if job.position.step >= job.plan.total_steps:
                    return
                yield piece
            continue
        start = 0
        while start < block.num_steps:
            step = job.position.step
            room = min([job.plan.total_steps - step, *(due - step % due for due in dues)])
            if room <= 0:
                return
            aligned = (block.first_step + start) % most == 0
            fits = most <= min(room, block.num_steps - start)
            count = most if aligned and fits else 1
            yield block.part(start, count)
            start += count


def _step_records(
    job: Job, clock: "_Clock", logged: list[int], losses: list[float], result: StepResult,
    lrs: list[float],
) -> Iterator[Record]:  # fmt: skip
    """Yield the `step` records of the logged steps, all within the steps just taken."""
    position = job.position
    size = job.plan.global_batch_size
    for step, loss in zip(logged, losses, strict=True):
        offset = step - position.step - 1  # from the end, since the call took several steps
        norms = result.grad_norms
        yield {
            "event": "step",
            "step": step,
            "epoch": position.epoch + 1,
            "loss": loss,
            "grad_norm": None if norms is None else float(norms[offset]),
            "lr": lrs[offset],
            "samples": position.samples + (offset + 1) * size,
            **clock.rate(position),
        }
    if logged:
        clock.mark(position)


def _dues(settings: Settings) -> list[int]:
    """Return after how many steps each something falls due within an epoch."""
    return [n for n in (settings.eval_every_steps, settings.checkpoint_every_steps) if n]


def _between_steps(
    job: Job, agreed: Agreed, window: Window, clock: "_Clock", lr: float
) -> Iterator[Record]:
    """Do what falls due within an epoch: agreed stops, evaluations and checkpoints by step."""
    settings, position = job.settings, job.position
    # What the end of the epoch does anyway is left to it, unless the job has to stop now.
    ends = _epoch_is_full(job) or position.step >= job.plan.total_steps
    evaluates = _due(settings.eval_every_steps, position.step) and not ends
    saves = (_due(settings.checkpoint_every_steps, position.step) or agreed.save) and not ends
    if not (evaluates or saves or agreed.signum):
        return
    window.read([], lr)  # nothing is saved that is not known to be finite
    _settle(job, window, clock)
    metric = None
    if evaluates and job.validation is not None:
        record, metric = _evaluate(job, job.validation)
        yield record
        _stop_early(job)
    if saves or agreed.signum or job.stop_reason:
        yield from _save(job, f"checkpoint_step_{position.step}.pt", metric)
    if agreed.signum:
        job.signum = agreed.signum
        job.stop_reason = Signals(agreed.signum).name
    clock.resume(job.position)


def _end_of_epoch(job: Job) -> Iterator[Record]:
    """Sum up the epoch, evaluate and save as the settings say; all three at the very end."""
    settings, plan, position = job.settings, job.plan, job.position
    whole = _epoch_is_full(job)
    number = position.epoch + 1
    samples = min(position.step_in_epoch * plan.global_batch_size, plan.num_samples)
    total = float(job.world.reduce(torch.tensor(job.loss_sum, dtype=torch.float64)))
    seconds = position.seconds - position.epoch_started_s
    yield {
        "event": "epoch",
        "epoch": number,
        "step": position.step,
        "loss": total / samples,
        "samples": samples,
        "train_seconds": seconds,
        "samples_per_s": samples / max(seconds, 1e-9),
    }
    last = position.step >= plan.total_steps
    metric = None
    evaluates = number % settings.eval_every_epochs == 0 or _due(
        settings.eval_every_steps, position.step
    )
    saves = number % settings.checkpoint_every_epochs == 0 or _due(
        settings.checkpoint_every_steps, position.step
    )
    if job.validation is not None and (last or evaluates):
        record, metric = _evaluate(job, job.validation)
        yield record
        _stop_early(job)
    if whole:
        position.epoch, position.step_in_epoch = number, 0
        position.epoch_started_s = position.seconds
        job.loss_sum = 0.0
    if last or job.stop_reason or saves:
        name = f"checkpoint_epoch_{number}.pt" if whole else f"checkpoint_step_{position.step}.pt"
        yield from _save(job, name, metric)


def _evaluate(job: Job, source: Source) -> tuple[Record, float]:
    share_buffers(job.trainee.model, job.world)
    values = evaluate(
        job.trainee.model,
        source,
        job.trainee.loss,
        job.metrics,
        world=job.world,
        batch_size=evaluation_batch(job.plan.batch_size),
        precision=job.settings.precision,
    )
    if not math.isfinite(values["loss"]):
        raise _diverged(job, "The validation loss is NaN or infinite")
    epoch = job.position.epoch + 1
    job.watch = job.watch.after(values[job.watch.metric], epoch, job.settings.min_delta)
    record = {"event": "evaluation", "split": "validation", "epoch": epoch,
              "step": job.position.step, **values}  # fmt: skip
    return record, values[job.watch.metric]


def _diverged(job: Job, what: str) -> UserError:
    lr = learning_rate(job.plan, job.settings, job.position.step - 1)
    return UserError(
        f"{what} after step {job.position.step} (learning rate {lr:.3g}). Training stopped; the "
        f"last good checkpoint is kept. {REMEDIES}",
        on_all_ranks=True,
    )


def evaluation_batch(batch_size: int) -> int:
    """Return the batch of an evaluation: without gradients four times as much fits."""
    return max(256, 4 * batch_size)


def _stop_early(job: Job) -> None:
    patience = job.settings.patience
    if patience is not None and job.watch.evaluations_since >= patience:
        job.stop_reason = "early stopping"


def _save(job: Job, name: str, metric: float | None) -> Iterator[Record]:
    # A gradient can overflow in the very last step, whose own loss was still finite.
    checks = [p.detach().isfinite().all() for p in job.trainee.model.parameters()]
    if checks and not bool(torch.stack(checks).all()):
        raise _diverged(job, "A weight is NaN or infinite")
    job.agreement.saved()
    yield job.save(job, name, metric)


def _settle(job: Job, window: Window, clock: "_Clock") -> None:
    """Bring the job's own account up to date with what the steps gathered."""
    window.read([], 0.0)
    job.loss_sum = window.loss_sum
    job.position.seconds = clock.seconds()


def _due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


class _Clock:
    """Count the seconds of training steps, without the evaluations and checkpoints between."""

    def __init__(self, position: Position) -> None:
        self._before, self._since = position.seconds, time.perf_counter()
        self._marked = (position.samples, position.seconds)
        self._shown = 0.0

    def seconds(self) -> float:
        """Return the seconds so far."""
        return self._before + time.perf_counter() - self._since

    def resume(self, position: Position) -> None:
        """Go on after a pause that began when the position was brought up to date."""
        self._before, self._since = position.seconds, time.perf_counter()

    def leave_out(self, seconds: float) -> None:
        """Do not count these seconds: they were spent in compiling."""
        self._since += seconds

    def rate(self, position: Position) -> Record:
        """Return the fields `seconds` and `samples_per_s`, the latter since the last mark."""
        samples, seconds = self._marked
        now = self.seconds()
        return {
            "seconds": now,
            "samples_per_s": (position.samples - samples) / max(now - seconds, 1e-9),
        }

    def mark(self, position: Position) -> None:
        """Measure the next rate from here."""
        self._marked = (position.samples, self.seconds())

    def shows(self) -> bool:
        """Whether a progress bar should move again."""
        now = time.perf_counter()
        if now - self._shown < _PROGRESS_EVERY_S:
            return False
        self._shown = now
        return True
