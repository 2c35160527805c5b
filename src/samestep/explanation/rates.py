"""The learning rate at a few steps of a training, by the function that the loop asks."""

from dataclasses import dataclass

from samestep.settings import Settings
from samestep.training.plan import ENDLESS, Plan, learning_rate


@dataclass(frozen=True, kw_only=True)
class Rate:
    """The learning rate of one step."""

    step: int
    """Counted from 1."""
    lr: float
    what: str
    """Why this step is shown, in a word or two."""


def rates(plan: Plan, settings: Settings, taken: int) -> tuple[Rate, ...]:
    """Return the rates at the first step, after the warm-up, in the middle and at the last step.

    `taken`: steps that a run which goes on has taken already; its next one is shown too.
    """
    named = {0: "first step"}
    if settings.warmup_steps:
        named[settings.warmup_steps] = "after the warm-up"
    if taken > 0:
        named[taken] = "next step"
    if plan.total_steps < ENDLESS:
        named.setdefault(plan.total_steps // 2, "half-way")
        named.setdefault(plan.total_steps - 1, "last step")
    return tuple(
        Rate(step=step + 1, lr=learning_rate(plan, settings, step), what=named[step])
        for step in sorted(named)
        if step < plan.total_steps
    )
