"""When a training evaluates and saves: a pure function of the settings and the position."""

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


def _due(every: int | None, count: int) -> bool:
    return every is not None and count % every == 0
