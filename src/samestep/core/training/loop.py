"""The training loop and what falls due between its steps: evaluations, checkpoints, the end.

`train` is a whole training and yields records; the caller decides what to do with them. `rehearse`
takes the same steps and does nothing else: break out once you have enough steps.
"""

import contextlib
import copy
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from signal import Signals
from typing import Any

import torch

from samestep.base.errors import UserError, made_by
from samestep.base.run.records import Record
from samestep.core.data.order import Block
from samestep.core.data.source import Source
from samestep.core.learner.agreement import is_checked
from samestep.core.learner.prepare import share_buffers
from samestep.core.plan import due_after_epoch, due_within_epoch, is_recorded, learning_rate
from samestep.core.training.evaluation import (
    Evaluable,
    EvaluationError,
    Interruptible,
    Totals,
    evaluate,
    evaluation_batch,
)
from samestep.core.training.meter import KEPT, REMEDIES, Meter, epoch_record
from samestep.core.training.snapshot import check_resumable
from samestep.core.training.stopping import Agreement
from samestep.core.training.work import (
    Position,
    State,
    StepsTaken,
    Work,
    close_epoch,
    epoch_is_full,
    is_done,
    newest_lr,
)
from samestep.launch.ranks import watched
from samestep.launch.ranks.mesh import parts_of_rank


class SaveTimer:
    """Whether this many minutes have passed by this process's clock; never for None."""

    def __init__(self, minutes: float | None) -> None:
        self._seconds = math.inf if minutes is None else minutes * 60
        self.restart()

    def restart(self) -> None:
        """Count from now."""
        self._began = time.perf_counter()

    def passed(self) -> bool:
        """Whether they have passed since the last restart."""
        return time.perf_counter() - self._began >= self._seconds


@dataclass(frozen=True, kw_only=True)
class RunControl:
    """What a run has besides its steps: stop signals, a checkpoint timer, and saving."""

    agreement: Agreement
    """On a stop signal, and on a checkpoint where --checkpoint-every-minutes have passed."""
    minutes: SaveTimer
    save: Callable[[float | None], None]
    """Take a checkpoint with this monitored value; its record comes once it is reported."""
    is_hopeless: Callable[[int, float], bool]
    """Evaluation's number, monitored metric → whether to stop by --halving; all ranks call it."""


class RoomNeeded(Exception):  # noqa: N818 - nothing is wrong
    """All ranks have agreed to part here, and to meet again with one that waits to join them."""


@contextlib.contextmanager
def _done_whole(work: Work, state: State) -> Iterator[None]:
    """Where ranks outlive each other, put the state back if one dies within this: it is due again.

    The weights do not change within it.
    """
    if not work.world.elastic:
        yield
        return
    scheduler = work.learner.scheduler
    before = replace(state, position=replace(state.position))
    schedule = None if scheduler is None else copy.deepcopy(scheduler.state())
    try:
        yield
    except RoomNeeded:
        raise
    except Exception:
        position = state.position  # `after_epoch` has changed the model: it is not called again
        before.position.told_epoch, before.position.told = position.told_epoch, position.told
        vars(state).update(vars(before))
        # A training may end within an epoch: what its end is due is done as a stopped run does it.
        at_end = is_done(work, state) and not epoch_is_full(work, state)
        state.position.evaluation_due |= at_end
        state.due_again = not state.position.evaluation_due
        if scheduler is not None:
            scheduler.load(schedule)
        raise


def after_step(work: Work, state: State, control: RunControl, meter: Meter) -> Iterable[Record]:
    """Do what is due within an epoch: agreed stops, evaluations and checkpoints by step."""
    step = state.position.step
    agreed = control.agreement.after(step)
    evaluates, saves = due_within_epoch(work.settings, step)
    saves = saves or agreed.wished
    if (evaluates or saves) and (epoch_is_full(work, state) or is_done(work, state)):
        evaluates = saves = False  # the end of the epoch does it anyway
    if not (evaluates or saves or agreed.signum or agreed.makes_room):
        return ()  # most steps: no generator is made for them

    def pause() -> Iterator[Record]:
        yield from meter.settle()
        with _done_whole(work, state):
            metric = None
            if evaluates and work.validation is not None:
                metric = yield from _evaluate(work, state, control)
                if state.signum:
                    return
            if saves or agreed.signum or state.stop_reason or _is_kept(work, state, metric):
                save_now(work, state, control, metric)
        if agreed.signum:
            stop_by(state, agreed.signum)
        elif agreed.makes_room:
            raise RoomNeeded
        meter.resume()

    return pause()


def catch_up(work: Work, state: State, control: RunControl) -> Iterator[Record]:
    """Evaluate and save where the attempt before was stopped within an evaluation."""
    position = state.position
    if not position.evaluation_due or work.validation is None:
        return
    position.evaluation_due = False
    # A training may end within an epoch; elsewhere the epoch's record is yet to come.
    last = is_done(work, state)
    epoch = [epoch_record(work, state)] if last else []
    metric = yield from _evaluate(work, state, control, *epoch)
    if not state.signum:
        save_now(work, state, control, metric)


def end_of_epoch(work: Work, state: State, control: RunControl) -> Iterator[Record]:
    """Record the epoch, evaluate and save as the settings say; at the very end do all three."""
    position, last = state.position, is_done(work, state)
    epoch = epoch_record(work, state)
    due = due_after_epoch(work.settings, position.epoch + 1, position.step, last=last)
    metric = None
    if work.validation is not None and due.evaluates:
        metric = yield from _evaluate(work, state, control, epoch)
        if state.signum:
            return
        number = (position.epoch + 1) // work.settings.eval_every_epochs
        if metric is not None and not last and control.is_hopeless(number, metric):
            state.stop_reason = state.stop_reason or "successive halving"
    else:
        yield with_after_epoch(work, state, epoch)
    if epoch_is_full(work, state):
        close_epoch(work, state)
    if due.saves or state.stop_reason or _is_kept(work, state, metric):
        save_now(work, state, control, metric)


def _evaluate(
    work: Work, state: State, control: RunControl, *before: Record
) -> Generator[Record, None, float | None]:
    """Yield the records `before` and an evaluation's own; return the monitored metric.

    If the evaluation fails or a signal stops it, save what is trained. A resumed run evaluates
    first and yields all of these records then.
    """
    position, agreement = state.position, control.agreement
    parts: list[Interruptible] = []

    def interruptible(source: Source) -> Interruptible:
        parts.append(Interruptible(source, agreement))
        return parts[-1]

    started = time.perf_counter()
    try:
        values = _measure(work, interruptible)
    except EvaluationError:
        position.evaluation_due = not epoch_is_full(work, state)
        save_now(work, state, control, None)
        raise
    if signum := agreement.on(max(part.left_for for part in parts)):
        position.evaluation_due = not epoch_is_full(work, state)
        stop_by(state, signum)
        save_now(work, state, control, None)
        return None
    # This evaluation is done: it will not be repeated.
    seconds, later = time.perf_counter() - started, work.after_epoch is not None
    if not (later and math.isfinite(values["loss"])):
        yield from before
    record, metric = note_validation(work, state, values, seconds)
    for epoch in before if later else ():
        yield with_after_epoch(work, state, epoch)
    yield record
    stop_early(work, state)
    return metric


def with_after_epoch(work: Work, state: State, epoch: Record) -> Record:
    """Return an epoch's record with what the recipe's `after_epoch` says of it."""
    position = state.position
    if work.after_epoch is None or not epoch_is_full(work, state):
        return epoch
    number = position.epoch + 1
    if position.told_epoch < number:

        def keep_values(values: dict[str, float]) -> None:
            position.told, position.told_epoch = values, number

        work.after_epoch(number, position.step, state.validated, keep_values)
    metrics = {**epoch.get("metrics", {}), **position.told}
    return {**epoch, "metrics": metrics} if metrics else epoch


def stop_by(state: State, signum: int) -> None:
    """Let the training end because of a signal."""
    state.signum, state.stop_reason = signum, Signals(signum).name


def evaluate_now(work: Work, state: State) -> tuple[Record, float]:
    """Validate at this point of the training; return the record and the monitored metric."""
    started = time.perf_counter()
    values = _measure(work, lambda source: source)
    return note_validation(work, state, values, time.perf_counter() - started)


def _measure(work: Work, read: Callable[[Source], Evaluable]) -> dict[str, Any]:
    assert work.validation is not None
    share_buffers(work.learner.model, work.world)
    values = evaluate_work(work, read(work.validation))
    return {**values, **measure_by_name(work, values, read)}


def measure_by_name(
    work: Work,
    first: Mapping[str, Any],
    read: Callable[[Source], Evaluable] = lambda source: source,
) -> dict[str, float]:
    """Return `NAME/loss`, `NAME/METRIC` of the validation sets; the first is measured already."""
    values: dict[str, float] = {}
    for name, source in work.by_name.items():
        of_it = first if source is work.validation else evaluate_work(work, read(source))
        values |= {f"{name}/{key}": of_it[key] for key in of_it if key != "samples"}
    return values


def evaluate_work(work: Work, source: Evaluable, classes: Sequence[str] = ()) -> dict[str, Any]:
    """Evaluate the model of a training, with its settings and averaged weights."""
    average = work.learner.average
    weights = contextlib.nullcontext() if average is None else average.in_place()
    with weights, made_by(*work.learner.makers), watched.within(watched.EVALUATION):
        totals = Totals(
            work.evaluation_loss,
            work.metrics,
            work.world,
            classes,
            work.learner.terms,
            reduction=work.learner.reduction,
            parts=work.evaluation_parts,
            measure=work.measure,
        )
        return evaluate(
            work.learner.applied,
            source,
            totals,
            batch_size=evaluation_batch(work.settings, work.plan.evaluated_at_once),
            precision=work.settings.precision,
            seed=work.settings.seed,
            forward=work.forward,
        )


def note_validation(
    work: Work, state: State, values: dict[str, float], seconds: float
) -> tuple[Record, float]:
    """Note a validation's values; return their record and the monitored metric."""
    if not math.isfinite(values["loss"]):
        raise _diverged(work, state, "The validation loss is NaN or infinite")
    epoch, metric = state.position.epoch + 1, values[state.watch.metric]
    state.watch = state.watch.after(metric, epoch, work.settings.min_delta)
    if (stops := state.stops) is not None:
        state.stops = stops.after(values[stops.metric], epoch, work.settings.min_delta)
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
    state.validated = {name: float(numbers[name]) for name in numbers if name != "samples"}
    if work.learner.scheduler is not None:
        work.learner.scheduler.after("validation", state.position.step, values, state.watch.metric)
    record: Record = {"event": "evaluation", "split": "validation", "epoch": epoch}
    return {**record, "step": state.position.step, **values, "seconds": seconds}, metric


def stop_early(work: Work, state: State) -> None:
    """Stop where --patience has run out."""
    patience = work.settings.patience
    if patience is not None and (state.stops or state.watch).evaluations_since >= patience:
        state.stop_reason = "early stopping"


def _is_kept(work: Work, state: State, metric: float | None) -> bool:
    """Whether early stopping needs these weights: they are the best so far."""
    best = state.watch.best
    return work.settings.patience is not None and metric is not None and metric == best


def save_now(work: Work, state: State, control: RunControl, metric: float | None) -> None:
    """Save the training as it stands."""
    with watched.within(watched.CHECKPOINT):
        check_weights(work, state)
        control.minutes.restart()
        control.save(metric)


def checkpoint_name(position: Position) -> str:
    """Return the file name of a checkpoint at a position."""
    if position.step_in_epoch:
        return f"checkpoint_step_{position.step}.pt"
    return f"checkpoint_epoch_{position.epoch}.pt"


def check_weights(work: Work, state: State) -> None:
    """Check that all weights are finite: a gradient can overflow though its loss was finite."""
    weights = [*work.learner.model.parameters()]
    sharded = work.learner.sharded
    checks = [p.isfinite().all() for p in (parts_of_rank(weights) if sharded else weights)]
    bad = bool(checks) and not bool(torch.stack(checks).all())
    if sharded:
        bad = bool(work.world.reduce(torch.tensor(int(bad)), "max"))
    if bad:
        raise _diverged(work, state, "A weight is NaN or infinite")


def _diverged(work: Work, state: State, why: str) -> UserError:
    step, lr = state.position.step, newest_lr(work, state)
    return UserError(
        f"{why} after step {step} (learning rate {lr:.3g}). {KEPT} {REMEDIES}", on_all_ranks=True
    )


def train(work: Work, state: State, control: RunControl) -> Iterator[Record]:
    """Train until the plan is done or all ranks agree to stop; yield records.

    They are `step`, `compile`, `epoch` and `evaluation`, as in events.jsonl, and `progress`, which
    only moves a progress bar. `state.stop_reason` then says why it ended.
    """
    work.learner.model.train()
    # Elastic ranks must know of each step what it yields before one of them may die.
    meter = Meter(work, state, lags=work.world.device.type == "cuda" and not work.world.elastic)
    control.agreement.start(state.position.step)
    stop_early(work, state)  # a resumed run may have stopped for that reason
    with _done_whole(work, state):
        yield from catch_up(work, state, control)
    if state.due_again and not epoch_is_full(work, state):
        yield from after_step(work, state, control, meter)
    state.due_again = False
    while not state.stop_reason and _goes_on(work, state):
        meter.resume()
        try:
            for taken in epoch_steps(work, state):
                watched.step(state.position.step)
                yield from meter.count(taken)
                if is_checked(taken.first_step, state.position.step):
                    check_resumable(work, state.position.step)
                yield from after_step(work, state, control, meter)
                if state.stop_reason:
                    return
        except Exception as error:  # the steps before have been taken
            yield from meter.settle() if work.world.elastic else meter.behind(error)
            raise
        yield from meter.settle()
        with _done_whole(work, state):
            yield from end_of_epoch(work, state, control)
    state.stop_reason = state.stop_reason or "finished"


def rehearse(work: Work, state: State) -> Generator[StepsTaken]:
    """Take the steps of a training, epoch after epoch, without evaluating, saving or stopping.

    Break out once you have enough steps; on several ranks all must do so after the same step.
    """
    work.learner.model.train()
    while _goes_on(work, state):
        yield from epoch_steps(work, state)
        if epoch_is_full(work, state):
            close_epoch(work, state)


def _goes_on(work: Work, state: State) -> bool:
    # A signal may have stopped a run between an epoch's last step and its evaluation.
    return not is_done(work, state) or epoch_is_full(work, state)


def epoch_steps(work: Work, state: State) -> Iterator[StepsTaken]:
    """Take the remaining steps of the running epoch; yield after each call of the step."""
    plan, settings, position = work.plan, work.settings, state.position
    scheduler = work.learner.scheduler
    if position.stream_ended or position.step >= plan.total_steps:
        return
    for block in _blocks(work, state):
        if work.batch_transform is not None:
            block = work.batch_transform(block, position.epoch, position.step)  # noqa: PLW2901
        work.phases.lap("data")
        first = position.step
        after = first + block.num_steps
        if scheduler is None:
            validated = state.validated
            lrs = [learning_rate(plan, settings, step, validated) for step in range(first, after)]
        else:
            lrs = [scheduler.begin_step()]  # one at a time, as what_compiles says
        logged = [s for s in range(first + 1, after + 1) if is_recorded(s, plan.log_every)]
        work.learner.moment.step, work.learner.moment.epoch = first, position.epoch
        result = work.step(block, first, lrs, want_norm=bool(logged))
        position.step = after
        position.step_in_epoch += block.num_steps
        position.samples += block.num_steps * block.global_size
        position.stream_ended = block.last
        if scheduler is not None:
            scheduler.after("step", after)
        yield StepsTaken(first, block.global_size, lrs, logged, result, block)
        work.phases.lap("other")
    if plan.is_stream and position.step < plan.total_steps:
        position.stream_ended = True  # also where a resumed run found nothing more


def _blocks(work: Work, state: State) -> Iterator[Block]:
    """Yield as many steps at once as the step takes, cut where something is due.

    The cuts depend only on the position, so a resumed run groups its steps as if never stopped.
    """
    settings, most = work.settings, work.step.steps_per_call
    for block in work.train.blocks(
        state.position.epoch,
        state.position.step_in_epoch,
        global_batch=work.plan.global_batch_size,
        drop_last=settings.drop_last,
        cut=work.plan.cut,
    ):
        if most == 1:
            for piece in block.singles():
                yield piece
                if state.position.step >= work.plan.total_steps:
                    return  # what comes after may be broken
            continue
        start = 0
        while start < block.num_steps:
            step = state.position.step
            dues = (settings.eval_every_steps, settings.checkpoint_every_steps)
            room = min([work.plan.total_steps - step, *(due - step % due for due in dues if due)])
            if room <= 0:
                return
            aligned = (block.first_step + start) % most == 0
            fits = most <= min(room, block.num_steps - start)
            count = most if aligned and fits else 1
            yield block.part(start, count)
            start += count
