"""What a step trains, and what it returns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from samestep.base.run.records import Record
from samestep.core.recipe import Reduction
from samestep.core.training.apply import Moment, Terms
from samestep.core.training.metrics import StepOutputs
from samestep.core.training.optimizer import Average, OwnAverage

if TYPE_CHECKING:
    from samestep.core.training.carried import Carried
    from samestep.core.training.scheduler import Scheduler


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
    average: Average | OwnAverage | None = None
    """What makes the weights that are evaluated, if they are others than those trained."""
    own: tuple[str, ...] = ()
    """What else the recipe defines itself, such as its batches or the optimizer."""
    carried: "Carried | None" = None
    """The state of each slot of the global batch, if the recipe carries any."""
    over_batch: bool = False
    """Whether the loss is made over the outputs of the whole global batch."""
    measured: bool = False
    """Whether metrics over the training epoch need the outputs."""
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
