"""What is trained, frozen, and where it stands: all that a loop is given."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from samestep.data.blocks import Block
from samestep.data.source import Source
from samestep.ranks.world import World
from samestep.settings import Settings
from samestep.training.clock import Position
from samestep.training.epoch_metrics import EpochMetrics
from samestep.training.phases import Phases
from samestep.training.plan import ENDLESS, Plan
from samestep.training.step import StepResult, Trainee
from samestep.training.stopping import Watch
from samestep.training.window import Sums


class Step(Protocol):
    """What takes optimizer steps: one by one, or several in one compiled graph."""

    steps_per_call: int

    def __call__(self, block: Block, step: int, lrs: list[float], *, want_norm: bool) -> StepResult:
        """Take the steps of a block.

        Args:
            block: the samples of this rank.
            step: steps taken before these in the run.
            lrs: the learning rate of each step.
            want_norm: whether the gradient norm is needed also where nothing is clipped.
        """


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is trained and how; nothing in here changes but the weights."""

    settings: Settings
    plan: Plan
    world: World
    trainee: Trainee
    step: Step
    train: Source
    validation: Source | None
    metrics: Mapping[str, Callable[[Any, Any], Tensor]]
    phases: Phases
    """Where this rank's time goes; the source and the step take part in the count."""
    classes: tuple[str, ...] = ()
    """Names of the classes, if the data has them."""
    forward: Callable[[Any], Any] | None = None
    """What evaluations call in the model's place: the model, compiled for them."""

    def close(self) -> None:
        """End what reads the data."""
        for source in (self.train, self.validation):
            if source is not None:
                source.close()

    def endless(self) -> "Work":
        """Return the same work without an end: for `rehearse`."""
        plan = replace(self.plan, total_steps=ENDLESS)
        return replace(self, plan=replace(plan, epochs=0) if plan.is_stream else plan)


@dataclass(kw_only=True)
class State:
    """Where a training stands, on this rank."""

    watch: Watch
    position: Position = field(default_factory=Position)
    sums: Sums = field(default_factory=Sums)
    """What the mean loss of the running epoch is made of."""
    measured: EpochMetrics = field(default_factory=lambda: EpochMetrics({}, torch.device("cpu")))
    """The metrics of what this rank has trained in the running epoch."""
    stop_reason: str = ""
    """Why the training ended; empty while it goes on."""
    signum: int = 0
    """The signal that stopped it, or 0."""


class Taken(NamedTuple):
    """One optimizer step that was taken, or several of one compiled graph."""

    first_step: int
    """Steps taken before these in the run."""
    size: int
    """Samples of each step over all ranks."""
    lrs: Sequence[float]
    """The learning rate of each step."""
    logged: Sequence[int]
    """Those of the steps that are recorded, counted from 1."""
    result: StepResult
    block: Block | None = None
    """The samples of this rank; None where another engine has read them."""


def epoch_is_full(work: Work, state: State) -> bool:
    """Whether all steps of the running epoch are taken."""
    position = state.position
    return position.step_in_epoch == work.plan.steps_per_epoch or position.stream_ended


def is_done(work: Work, state: State) -> bool:
    """Whether all steps of the training are taken."""
    plan, position = work.plan, state.position
    if position.step >= plan.total_steps:
        return True
    return 0 < plan.epochs <= position.epoch + position.stream_ended and plan.is_stream


def close_epoch(work: Work, state: State) -> None:
    """Count an epoch that is trained and evaluated; the next one begins."""
    position = state.position
    position.epoch, position.step_in_epoch = position.epoch + 1, 0
    position.stream_ended, position.samples_before = False, position.samples
    position.epoch_started_s = position.seconds
    position.phases = {}
    work.phases.clear()
    state.sums = Sums()
    state.measured.reset()
