"""The training loop: it yields records, and whoever calls it does with them what it likes."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from signal import Signals
from typing import Any

import torch
from torch import Tensor

from samestep.data.blocks import Block
from samestep.data.source import Source
from samestep.errors import UserError
from samestep.ranks.world import World
from samestep.run.records import Record
from samestep.settings import Settings
from samestep.training.clock import Clock, Position
from samestep.training.evaluation import evaluate
from samestep.training.parallel import share_buffers
from samestep.training.phases import Phases, compute_of
from samestep.training.plan import Plan, learning_rate
from samestep.training.step import EagerStep, StepResult, Trainee
from samestep.training.stopping import NOTHING, Agreed, Agreement, Watch
from samestep.training.window import KEPT, REMEDIES, Window


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
    phases: Phases = field(default_factory=Phases)
    """Where this rank's time goes; the source and the step take part in the count."""
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
    job.phases.earlier = dict(job.position.phases)
    job.agreement.start(job.position.step)
    stop_early(job)  # a resumed run may have stopped for that reason
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
    clock, phases = Clock(job.position), job.phases
    position, dues = job.position, _dues(settings)
    phases.begin()
    for piece in _pieces(job):
        phases.lap("data")
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
            yield {
                "event": "progress",
                "step": after,
                "samples": position.samples,
                **clock.rate(position),
            }
        agreed = job.agreement.after(after)
        if agreed is not NOTHING or any(after % due == 0 for due in dues):
            yield from _between_steps(job, agreed, window, clock, lrs[-1])
            if job.stop_reason:
                return
        phases.lap("other")
    window.read([], learning_rate(plan, settings, job.position.step - 1))
    settle(job, window, clock)


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
    job: Job,
    clock: Clock,
    logged: list[int],
    losses: list[float],
    result: StepResult,
    lrs: list[float],
) -> Iterator[Record]:
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
    job: Job, agreed: Agreed, window: Window, clock: Clock, lr: float
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
    settle(job, window, clock)
    metric = None
    if evaluates and job.validation is not None:
        record, metric = evaluate_job(job, job.validation)
        yield record
        stop_early(job)
    if saves or agreed.signum or job.stop_reason:
        yield from _save(job, file_name(job), metric)
    if agreed.signum:
        job.signum = agreed.signum
        job.stop_reason = Signals(agreed.signum).name
    clock.resume(job.position)
    job.phases.begin()


def _end_of_epoch(job: Job) -> Iterator[Record]:
    """Sum up the epoch, evaluate and save as the settings say; all three at the very end."""
    settings, plan, position = job.settings, job.plan, job.position
    whole = _epoch_is_full(job)
    number = position.epoch + 1
    yield epoch_record(job)
    last = position.step >= plan.total_steps
    metric = None
    evaluates = number % settings.eval_every_epochs == 0 or _due(
        settings.eval_every_steps, position.step
    )
    saves = number % settings.checkpoint_every_epochs == 0 or _due(
        settings.checkpoint_every_steps, position.step
    )
    if job.validation is not None and (last or evaluates):
        record, metric = evaluate_job(job, job.validation)
        yield record
        stop_early(job)
    if whole:
        close_epoch(job)
    if last or job.stop_reason or saves:
        yield from _save(job, file_name(job), metric)


def epoch_record(job: Job) -> Record:
    """Return the `epoch` record of the epoch that has just been trained."""
    plan, position = job.plan, job.position
    samples = min(position.step_in_epoch * plan.global_batch_size, plan.num_samples)
    # Each rank fills its own row, so that the sum over the ranks is all of them.
    rows = torch.zeros(plan.world_size, 4, dtype=torch.float64)
    mine = [job.loss_sum, *_spread(job.phases.seconds()).values()]
    rows[job.world.rank] = torch.tensor(mine, dtype=torch.float64)
    losses, *columns = job.world.reduce(rows).T.tolist()
    seconds = position.seconds - position.epoch_started_s
    return {
        "event": "epoch",
        "epoch": position.epoch + 1,
        "step": position.step,
        "loss": sum(losses) / samples,
        "samples": samples,
        "train_seconds": seconds,
        "samples_per_s": samples / max(seconds, 1e-9),
        "phases": position.phases,
        **({"ranks": dict(zip(_spread({}), columns, strict=True))} if plan.world_size > 1 else {}),
    }


def _spread(phases: dict[str, float]) -> dict[str, float]:
    """Return what tells a slow rank from those that wait for it."""
    data = phases.get("data", 0.0) + phases.get("to_device", 0.0)
    return {"data": data, "compute": compute_of(phases), "all_reduce": phases.get("all_reduce", 0)}


def close_epoch(job: Job) -> None:
    """Count an epoch that is trained and evaluated."""
    position = job.position
    position.epoch, position.step_in_epoch = position.epoch + 1, 0
    position.epoch_started_s = position.seconds
    position.phases = {}
    job.phases.clear()
    job.loss_sum = 0.0


def file_name(job: Job) -> str:
    """Return the name of a checkpoint of where the job stands."""
    position = job.position
    if position.step_in_epoch:
        return f"checkpoint_step_{position.step}.pt"
    return f"checkpoint_epoch_{position.epoch}.pt"


def evaluate_job(job: Job, source: Source) -> tuple[Record, float]:
    """Evaluate where the job stands; return the `evaluation` record and the monitored metric."""
    started = time.perf_counter()
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
    return judge(job, values, time.perf_counter() - started)


def judge(job: Job, values: dict[str, float], seconds: float) -> tuple[Record, float]:
    """Take note of a validation's values; return their record and the monitored metric.

    Raises:
        UserError: the loss is NaN or infinite.
    """
    if not math.isfinite(values["loss"]):
        raise diverged(job, "The validation loss is NaN or infinite")
    epoch = job.position.epoch + 1
    job.watch = job.watch.after(values[job.watch.metric], epoch, job.settings.min_delta)
    record = {
        "event": "evaluation",
        "split": "validation",
        "epoch": epoch,
        "step": job.position.step,
        **values,
        "seconds": seconds,
    }
    return record, values[job.watch.metric]


def diverged(job: Job, what: str) -> UserError:
    """Return the message for numbers that are no longer finite."""
    lr = learning_rate(job.plan, job.settings, job.position.step - 1)
    return UserError(
        f"{what} after step {job.position.step} (learning rate {lr:.3g}). {KEPT} {REMEDIES}",
        on_all_ranks=True,
    )


def evaluation_batch(batch_size: int) -> int:
    """Return the batch of an evaluation: without gradients four times as much fits."""
    return max(256, 4 * batch_size)


def stop_early(job: Job) -> None:
    """Stop where --patience has run out."""
    patience = job.settings.patience
    if patience is not None and job.watch.evaluations_since >= patience:
        job.stop_reason = "early stopping"


def _save(job: Job, name: str, metric: float | None) -> Iterator[Record]:
    check_weights(job)
    job.agreement.saved()
    yield job.save(job, name, metric)


def check_weights(job: Job) -> None:
    """Check that what is to be saved is finite.

    Raises:
        UserError: it is not; a gradient can overflow in a step whose own loss was still finite.
    """
    checks = [p.detach().isfinite().all() for p in job.trainee.model.parameters()]
    if checks and not bool(torch.stack(checks).all()):
        raise diverged(job, "A weight is NaN or infinite")


def settle(job: Job, window: Window, clock: Clock) -> None:
    """Bring the job's own account up to date with what the steps gathered."""
    window.read([], 0.0)
    job.loss_sum = window.loss_sum
    job.phases.lap("other")
    job.position.seconds = clock.seconds()
    job.position.phases = job.phases.total()


def _due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0
