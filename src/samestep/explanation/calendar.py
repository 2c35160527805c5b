"""When a training evaluates and saves, from where it stands to its end, and what is kept of it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from samestep.run.index import Entry, Index
from samestep.settings import Settings
from samestep.training.loop import checkpoint_name
from samestep.training.plan import Plan, due_after_epoch, due_within_epoch
from samestep.training.stopping import Watch
from samestep.training.work import Position

_MOST = 100_000
"""Events that are still written out; a training with more is told by its settings alone."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """A place in the training at which it evaluates, saves, or both."""

    step: int
    """Counted from 1."""
    epoch: int
    """Counted from 1."""
    evaluates: bool
    saves: str
    """The checkpoint's file name; empty where none is saved."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """How many checkpoint files there are once the training is through."""

    fewest: int
    most: int


def calendar(
    plan: Plan, settings: Settings, position: Position, *, evaluates: bool
) -> tuple[Event, ...] | None:
    """Return all that falls due from a position on; None of a stream, or where it is too much.

    `evaluates`: whether there is validation data. Early stopping and signals are not foreseen.
    """
    every = (settings.eval_every_steps, settings.checkpoint_every_steps)
    most = plan.epochs + sum(plan.total_steps // each for each in every if each)
    if plan.is_stream or most > _MOST:
        return None
    found = _events(plan, settings, position)
    due = (replace(event, evaluates=event.evaluates and evaluates) for event in found)
    return tuple(event for event in due if event.evaluates or event.saves)


def _events(plan: Plan, settings: Settings, start: Position) -> Iterator[Event]:
    every = (settings.eval_every_steps, settings.checkpoint_every_steps)
    for epoch in range(start.epoch, plan.epochs):
        begin = epoch * plan.steps_per_epoch
        end = min(begin + plan.steps_per_epoch, plan.total_steps)
        after = max(start.step, begin)
        full = end - begin == plan.steps_per_epoch
        if end < start.step or (end == start.step and not full):
            continue  # it is trained already
        for step in sorted({s for e in every if e for s in range(after - after % e + e, end, e)}):
            due = due_within_epoch(settings, step)
            name = _name(epoch, step, step - begin) if due.saves else ""
            yield Event(step=step, epoch=epoch + 1, evaluates=due.evaluates, saves=name)
        due = due_after_epoch(settings, epoch + 1, end, last=end == plan.total_steps)
        name = _name(epoch + full, end, 0 if full else end - begin)
        saves = name if due.saves else ""
        yield Event(step=end, epoch=epoch + 1, evaluates=due.evaluates, saves=saves)


def _name(epoch: int, step: int, step_in_epoch: int) -> str:
    position = Position(epoch=epoch, step=step, step_in_epoch=step_in_epoch)
    return checkpoint_name(position)


def kept_files(events: tuple[Event, ...], keep_top_k: int | None, before: Index) -> Kept:
    """Return how many checkpoints are kept, whatever the metric does.

    The fewest are kept where the last is among the best, the most where each is worse than the one
    before. `before` are those that a run has already.
    """
    saved = [event for event in events if event.saves]
    if keep_top_k is None:
        steps = {entry.step for entry in before.checkpoints} | {event.step for event in saved}
        return Kept(fewest=len(steps), most=len(steps))
    counts = []
    for sign in (1, -1):
        index = replace(before, mode="max")
        for event in saved:
            metric = float(sign * event.step) if event.evaluates else None
            entry = Entry(
                path=event.saves, step=event.step, epoch=event.epoch, sha256="", metric=metric
            )
            index = index.add(entry).prune(keep_top_k)
        counts.append(len(index.checkpoints))
    return Kept(fewest=min(counts), most=max(counts))


def first_stop(patience: int | None, events: tuple[Event, ...], watch: Watch) -> Event | None:
    """Return the evaluation after which --patience can stop the training first, if it can.

    `watch` is the monitored metric so far; none of the evaluations to come improves on it.
    """
    if patience is None:
        return None
    for event in events:
        if event.evaluates:
            # The very first evaluation is an improvement, whatever it gives.
            worse = 0.0 if watch.reference is None else math.nan
            watch = watch.after(worse, event.epoch, 0.0)
            if watch.evaluations_since >= patience:
                return event
    return None
