"""What is trained and how, what a step returns, and where the training stands."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from samestep.base.phases import Phases
from samestep.base.run.records import Record
from samestep.base.settings import Settings
from samestep.core.data.order import Block
from samestep.core.data.source import Source
from samestep.core.learner.apply import Measure, Moment, Terms
from samestep.core.learner.device import ModelCost
from samestep.core.learner.model_state import ModelTrial
from samestep.core.plan import ENDLESS, Plan, learning_rate
from samestep.core.recipe import Reduction
from samestep.core.training.metrics import EpochMetrics, StepOutputs
from samestep.core.training.stopping import Watch
from samestep.launch.ranks.world import World

if TYPE_CHECKING:
    from samestep.core.learner.after_epoch import AfterEpoch
    from samestep.core.learner.averages import Average, OwnAverage
    from samestep.core.learner.batch_transform import BatchTransform
    from samestep.core.learner.carried import Carried
    from samestep.core.learner.scheduler import Scheduler


@dataclass(kw_only=True)
class Position:
    """Where the training stands: saved in each checkpoint, and resumed from."""

    step: int = 0
    """Optimizer steps taken."""
    epoch: int = 0
    """Epochs finished, their evaluation included."""
    step_in_epoch: int = 0
    stream_ended: bool = False
    """Whether all of the running epoch's stream is trained."""
    samples: int = 0
    samples_before: int = 0
    """The value of `samples` when the running epoch began."""
    seconds: float = 0.0
    """Seconds spent in training steps, over all attempts."""
    epoch_started_s: float = 0.0
    """The value of `seconds` when the running epoch began."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds of the running epoch in each phase of its steps, on rank 0."""
    told_epoch: int = 0
    """The newest epoch after which the recipe's `after_epoch` was called, from 1."""
    told: dict[str, float] = field(default_factory=dict)
    """What it returned then."""
    evaluation_due: bool = False
    """Whether an evaluation that fell due within the epoch was stopped, and is to be done first."""


class Sums(NamedTuple):
    """What the mean loss of an epoch is made of."""

    loss: float = 0.0
    """This rank's part of the sum of the losses of all samples or terms."""
    terms: float = 0.0
    """Samples or terms of all ranks."""
    parts: tuple[float, ...] = ()
    """As `loss`, of the losses by name that it is the sum of."""


@dataclass(frozen=True, kw_only=True)
class Learner:
    """What a step trains: the model, wrapped for all ranks, its loss and the optimizer."""

    model: nn.Module
    applied: nn.Module
    """What takes the inputs: the model, or the model by the recipe's `forward`."""
    wrapped: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    loss: Callable[[Any, Any], Tensor]
    moment: Moment = field(default_factory=Moment)
    """What a loss that asks for it gets."""
    reduction: Reduction = "mean"
    """Whether the loss is a mean over samples, or their sum."""
    parts: tuple[str, ...] = ()
    """Names of the losses that the loss is the sum of; it has them in `parts`."""
    terms: Terms | None = None
    """Counts what the loss of a batch is a mean over, where that is not samples."""
    counter: nn.Parameter | None = None
    """Among several ranks: the weight, always 0, whose gradient is the number of terms."""
    scheduler: "Scheduler | None" = None
    """What sets the learning rates, if the recipe's schedule makes a scheduler of PyTorch."""
    optimizer_maker: object = None
    """The recipe's function that returned the optimizer, if that is its own."""
    made: Sequence[Mapping[str, Any]] = ()
    """What the groups of the recipe's own optimizer held when it was new."""
    average: "Average | OwnAverage | None" = None
    """What makes the weights that are evaluated, if they are others than those trained."""
    own: tuple[str, ...] = ()
    """What else the recipe defines itself, such as its batches or the optimizer."""
    carried: "Carried | None" = None
    """The state of each slot of the global batch, if the recipe carries any."""
    over_batch: bool = False
    """Whether the loss is made over the outputs of the whole global batch."""
    measured: bool = False
    """Whether metrics over the training epoch need the outputs."""
    sharded: bool = False
    """Whether each rank holds a part of the weights."""
    alone: bool = False
    """Whether model and loss are the only user code between two steps of an epoch."""
    makers: tuple[object, ...] = ()
    """The functions that build the model and read the data, for a message."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of consecutive steps, left on the device so that the host need not wait."""

    losses: Sequence[Tensor]
    """This rank's part of each step's mean loss; over all ranks they add up to it. A vector where
    the loss is a sum of named ones: (1 + names,), their sum first."""
    grad_norms: Sequence[Tensor] | Tensor | None
    """Gradient norm of each step before clipping, if requested."""
    terms: Sequence[Tensor] | None = None
    """What each step's mean is over, on all ranks together, where that is not samples."""
    seen: Sequence[StepOutputs] = ()
    """The outputs, if metrics need them."""
    notes: tuple[Record, ...] = ()
    """`compile` records of what was compiled in this call."""


class Step(Protocol):
    """What takes optimizer steps: one by one, or several in one compiled graph."""

    steps_per_call: int

    def __call__(self, block: Block, step: int, lrs: list[float], *, want_norm: bool) -> StepResult:
        """Take the steps of a block, this rank's samples, after `step` steps of the run.

        `lrs` has the learning rate of each; `want_norm` asks for the norm even without clipping.
        """


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is trained and how; only the weights change."""

    settings: Settings
    plan: Plan
    world: World
    learner: Learner
    step: Step
    train: Source
    validation: Source | None
    by_name: Mapping[str, Source] = field(default_factory=dict)
    """All of several validation sets; `validation` is the first of them."""
    evaluation_loss: Callable[[Any, Any], Tensor]
    """What evaluations measure as the loss: that of the training, or the recipe's own."""
    evaluation_parts: tuple[str, ...] = ()
    """Names of the losses that it is the sum of."""
    metrics: Mapping[str, Callable[[Any, Any], Tensor]]
    phases: Phases
    """Where this rank's time goes; the source and the step take part in the count."""
    classes: tuple[str, ...] = ()
    """Names of the classes, if the data has them."""
    measure: Measure | None = None
    batch_transform: "BatchTransform | None" = None
    after_epoch: "AfterEpoch | None" = None
    cost: ModelCost = field(default_factory=ModelCost)
    """What a sample costs to train."""
    trial: ModelTrial
    """Whether a checkpoint leads back to the model's state."""
    forward: Callable[[Any], Any] | None = None
    """What evaluations call in the model's place: the model, compiled for them."""

    @cached_property
    def order(self) -> dict[str, Any]:
        """What the order of samples depends on."""
        plan, settings = self.plan, self.settings
        order = {"num_samples": plan.num_samples, "global_batch_size": plan.global_batch_size}
        order |= {"seed": settings.seed, "drop_last": settings.drop_last}
        return order | self.train.order_record()

    def close(self) -> None:
        """Close what reads the data."""
        for source in self.sources():
            source.close()

    def sources(self) -> list[Source]:
        """Return the sources of the training and validation data."""
        held_out = () if self.validation is None else (self.validation,)
        return [self.train, *(self.by_name.values() or held_out)]

    def endless(self) -> "Work":
        """Return the same work without an end, for `rehearse`."""
        plan = replace(self.plan, total_steps=ENDLESS)
        return replace(self, plan=replace(plan, epochs=0) if plan.is_stream else plan)


@dataclass(kw_only=True)
class State:
    """Where a training stands, on this rank."""

    watch: Watch
    stops: Watch | None = None
    """What --patience follows, if that is not what decides which checkpoint is best."""
    position: Position = field(default_factory=Position)
    sums: Sums = field(default_factory=Sums)
    """What the mean loss of the running epoch is made of."""
    validated: dict[str, float] = field(default_factory=dict)
    """The loss and the metrics of the newest validation; empty before the first."""
    measured: EpochMetrics = field(default_factory=lambda: EpochMetrics({}, torch.device("cpu")))
    """The metrics of what this rank has trained in the running epoch."""
    stop_reason: str = ""
    """Why the training ended; empty until then."""
    signum: int = 0
    """The signal that stopped it, or 0."""
    due_again: bool = False
    """Whether what fell due after the newest step was not done to its end."""


class StepsTaken(NamedTuple):
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


def newest_lr(work: Work, state: State) -> float:
    """Return the learning rate of the newest step, for a message."""
    if work.learner.scheduler is not None:
        return work.learner.scheduler.lr
    return learning_rate(work.plan, work.settings, state.position.step - 1, state.validated)


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
    """Count an epoch that is trained and evaluated; begin the next."""
    position = state.position
    if work.learner.scheduler is not None:
        work.learner.scheduler.after("epoch", position.step)
    position.epoch, position.step_in_epoch = position.epoch + 1, 0
    position.stream_ended = False
    position.samples_before = position.samples
    position.epoch_started_s = position.seconds
    position.phases = {}
    work.phases.clear()
    state.sums = Sums()
    state.measured.reset()
