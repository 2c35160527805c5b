"""When a training records, evaluates and saves: pure functions of settings and position."""

from typing import NamedTuple

from samestep.settings import Settings


class Due(NamedTuple):
    """What falls due after a step or an epoch."""

    evaluates: bool
    saves: bool


def due_within_epoch(settings: Settings, step: int) -> Due:
    """Return what falls due after a step, counted from 1, that does not end its epoch."""
    return Due(_due(settings.eval_every_steps, step), _due(settings.checkpoint_every_steps, step))


def due_after_epoch(settings: Settings, epoch: int, step: int, *, last: bool) -> Due:
    """Return what falls due after an epoch, counted from 1, that ends with a step.

    `last`: whether the training ends there.
    """
    within = due_within_epoch(settings, step)
    return Due(
        last or _due(settings.eval_every_epochs, epoch) or within.evaluates,
        last or _due(settings.checkpoint_every_epochs, epoch) or within.saves,
    )


def steps_between_records(total_steps: int) -> int:
    """Return how many steps lie between two `step` records by default."""
    return next((steps for steps in (50, 20, 10, 5, 2) if total_steps >= 200 * steps), 1)


def is_recorded(step: int, log_every: int | None) -> bool:
    """Whether a step, counted from 1, has a record of its own.

    None is the default of a stream whose length nobody knows: at each step, as if it ended there.
    """
    return step % (log_every or steps_between_records(step)) == 0


def _due(every: int | None, count: int) -> bool:
    return every is not None and count % every == 0
