"""The training loop: it yields records, and whoever calls it does with them what it likes.

`train` is a whole training. `rehearse` takes the same steps and does nothing else; who needs only a
few of them iterates over it as long as it likes.
"""

from collections.abc import Generator, Iterator

from samestep.data.blocks import Block
from samestep.run.records import Record
from samestep.training.alike import is_checked
from samestep.training.between import Between, after_step, catch_up, end_of_epoch, stop_early
from samestep.training.due import is_recorded
from samestep.training.meter import Meter
from samestep.training.plan import learning_rate
from samestep.training.snapshot import check_alike
from samestep.training.work import State, Taken, Work, close_epoch, epoch_is_full, is_done


def train(work: Work, state: State, between: Between) -> Iterator[Record]:
    """Train until the plan is done or a reason to stop is agreed; yield what happened.

    Yields:
        Records named `step`, `compile`, `epoch`, `evaluation` and `checkpoint`, as events.jsonl
        keeps them, and `progress`, which only moves a progress bar. Afterwards
        `state.stop_reason` says why it ended.

    Raises:
        UserError: the loss became NaN or infinite, the ranks' weights have drifted apart, or a
            checkpoint could not be written.
    """
    work.trainee.model.train()
    meter = Meter(work, state)
    between.agreement.start(state.position.step)
    stop_early(work, state)  # a resumed run may have stopped for that reason
    yield from catch_up(work, state, between)
    while not state.stop_reason and _goes_on(work, state):
        meter.resume()
        for taken in epoch_steps(work, state):
            yield from meter.count(taken)
            if is_checked(taken.first_step, state.position.step):
                check_alike(work, state.position.step)
            yield from after_step(work, state, between, meter)
            if state.stop_reason:
                return
        meter.settle()
        yield from end_of_epoch(work, state, between)
    state.stop_reason = state.stop_reason or "finished"


def rehearse(work: Work, state: State) -> Generator[Taken]:
    """Take the steps of a training, epoch after epoch, and yield after each; do nothing else.

    Nothing is evaluated, saved or agreed on. To stop, leave the iteration: on several ranks all
    have to do so after the same step.
    """
    work.trainee.model.train()
    while _goes_on(work, state):
        yield from epoch_steps(work, state)
        if epoch_is_full(work, state):
            close_epoch(work, state)


def _goes_on(work: Work, state: State) -> bool:
    # A signal may have stopped a run between an epoch's last step and its evaluation.
    return not is_done(work, state) or epoch_is_full(work, state)


def epoch_steps(work: Work, state: State) -> Iterator[Taken]:
    """Take the remaining steps of the running epoch; yield after each call of the step."""
    plan, settings, position = work.plan, work.settings, state.position
    if position.stream_ended or position.step >= plan.total_steps:
        return
    for block in _blocks(work, state):
        work.phases.lap("data")
        first = position.step
        after = first + block.num_steps
        lrs = [learning_rate(plan, settings, step) for step in range(first, after)]
        logged = [s for s in range(first + 1, after + 1) if is_recorded(s, plan.log_every)]
        result = work.step(block, first, lrs, want_norm=bool(logged))
        position.step = after
        position.step_in_epoch += block.num_steps
        position.samples += block.num_steps * block.global_size
        position.stream_ended = block.last
        yield Taken(first, block.global_size, lrs, logged, result, block)
        work.phases.lap("other")
    if plan.is_stream and position.step < plan.total_steps:
        position.stream_ended = True  # also where a resumed run found nothing more


def _blocks(work: Work, state: State) -> Iterator[Block]:
    """Yield blocks as long as the step takes at once, cut where something falls due.

    The cuts depend on the position alone, so a resumed run groups its steps as if never stopped.
    """
    settings, most = work.settings, work.step.steps_per_call
    for block in work.train.blocks(
        state.position.epoch,
        state.position.step_in_epoch,
        global_batch=work.plan.global_batch_size,
        drop_last=settings.drop_last,
        cut=work.plan.cut(settings),
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
