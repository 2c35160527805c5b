"""What a step goes backward from: the loss of each micro-step, and how these make the step's."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from samestep.base.errors import UserError, blame, defined_at, listed, made_by
from samestep.base.settings import Settings
from samestep.base.trees import describe, map_tensors
from samestep.core.data.blocks import Block
from samestep.core.training.alike import RankSeeds
from samestep.core.training.apply import call, with_parts
from samestep.core.training.device import autocast, autocast_dtype
from samestep.core.training.learner import Learner
from samestep.core.training.metrics import StepOutputs, remedy_of
from samestep.launch.ranks.mesh import any_sharded
from samestep.launch.ranks.world import World

CallModel = Callable[[Block], Any]
"""Micro-step → the model's outputs."""


def plain_call(learner: Learner) -> CallModel:
    """Return what calls the wrapped model with a micro-step's inputs."""
    model = learner.wrapped

    def called(part: Block) -> Any:
        inputs = part.inputs
        return call(model, inputs, learner.applied) if isinstance(inputs, dict) else model(inputs)

    return called


class Objective:
    """The mean of a loss over the samples of the global batch, or their sum."""

    def __init__(
        self,
        learner: Learner,
        settings: Settings,
        world: World,
        seeds: RankSeeds | None = None,
        call_model: CallModel | None = None,
    ) -> None:
        """Take what a step trains; `seeds` and `call_model` replace the plain ones."""
        self._learner, self._world = learner, world
        self.seeds = seeds or RankSeeds(settings.seed, world)
        self._call_model = call_model or plain_call(learner)
        self._precision = settings.precision
        self._casts = autocast_dtype(settings.precision) is not None
        self._divisor = 1 if world.virtual_ranks else world.world_size
        """What DDP divides gradients by, which the weights undo; virtual ranks' are added up."""
        self.agreed = False
        """Whether all ranks have computed a loss; until then, a mistake on one raises on all."""
        self.outputs: Any = None
        """Of the newest forward in this step."""
        self.terms: Tensor | None = None
        """Of the micro-steps that were weighed last, where the loss is a mean over terms."""

    def begin(self, parts: Sequence[Block], global_size: int) -> None:
        """Prepare a step, before its first micro-step: here there is nothing to prepare."""

    def weigh(self, parts: Sequence[Block]) -> Sequence[Any]:
        """Return the weight of each micro-step, which `loss` takes with it."""
        if self._learner.reduction == "sum":
            return [part.weight * self._divisor for part in parts]
        return [part.weight * part.rows * self._divisor / part.global_size for part in parts]

    def loss(self, part: Block, weight: Any) -> tuple[Tensor, Tensor]:
        """Return what a micro-step goes backward from, and the loss to add to the step's."""
        return self.weighted(self.compute(part), weight)

    def of_rank(self, total: Tensor) -> Tensor:
        """Return this rank's part of the step's loss; its micro-steps add up to `total`."""
        return total / self._divisor if self._divisor > 1 else total

    def mean(self, total: Tensor, global_size: int) -> tuple[Tensor, Tensor | None]:
        """Return the step's loss, and how many terms it is over where these are not samples.

        `total` is this rank's part, or that of all ranks.
        """
        return total / global_size if self._learner.reduction == "sum" else total, None

    def agree_without_samples(self) -> None:
        """Join the collectives in which other ranks compute their first loss."""
        self._world.on_every(lambda: None)
        self.agreed = True

    def compute(self, part: Block) -> Tensor:
        """Return the loss of a micro-step; the first is checked, on all ranks."""
        if self.agreed:
            return self._forward_with_loss(part)

        def checked() -> Tensor:
            try:
                loss = self._forward_with_loss(part)
            except Exception as error:
                self.explain(error, part.inputs, part.targets)
            with made_by(*self._learner.makers):
                check_trainable(loss, self._learner.loss)
            return loss

        loss = self._world.on_every(checked)
        self.agreed = True
        return loss

    def _forward_with_loss(self, part: Block) -> Tensor:
        if not self._casts:  # a context takes a measurable part of a small step
            self.outputs = self._call_model(part)
            return self._learner.loss(self.outputs, part.targets)
        with autocast(self._precision, self._world.device):
            self.outputs = self._call_model(part)
            loss = self._learner.loss(self.outputs, part.targets)
        torch.clear_autocast_cache()  # a context that user code left open would keep these weights
        return loss

    def weighted(self, loss: Tensor, weight: float | Tensor) -> tuple[Tensor, Tensor]:
        """Return a loss times its weight: scaled for the backward, and as records have it."""
        reported = with_parts(loss) * weight if self._learner.parts else None
        if isinstance(weight, Tensor) or weight != 1.0:
            loss = loss * weight
        scaler = self._learner.scaler
        scaled = loss if scaler is None else scaler.scale(loss)
        return scaled, loss.detach() if reported is None else reported

    def seen(self, part: Block) -> StepOutputs:
        """Return the outputs of the newest micro-step, for metrics."""
        outputs = self.outputs
        is_tensor = isinstance(outputs, Tensor)
        detached = outputs.detach() if is_tensor else map_tensors(Tensor.detach, outputs)
        return StepOutputs(detached, part.targets, part.rows, part.place)

    def explain(self, error: Exception, inputs: Any, targets: Any) -> NoReturn:
        """Raise an error of a forward or backward again, as a mistake of the recipe."""
        if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise error
        when = f"at step {self.seeds.step + 1}" if self.agreed else "on the first batch"
        outputs, loss = self.outputs, self._learner.loss  # None where forward has not ended
        remedy = "" if outputs is None else remedy_of(error, outputs, targets, loss)
        blame(
            f"The recipe's model or loss failed {when}, with inputs {describe(inputs)} and "
            f"targets {describe(targets)} on this rank",
            error,
            *self._learner.makers,
            remedy=remedy,
        )


def check_used(model: nn.Module) -> None:
    """Check, after the first backward, that each parameter has a gradient: DDP waits for it."""
    named = model.named_parameters()
    or_else = "" if any_sharded(model) else ", or, if other steps use them, add --find-unused"
    unused = [name for name, p in named if p.requires_grad and p.grad is None]
    if unused:
        raise UserError(
            f"The loss does not depend on {listed(unused)}, so ranks would wait for a gradient "
            "that never comes. Use these parameters in forward, or freeze them with "
            f"requires_grad_(False){or_else}."
        )


def check_loss(value: Any, loss: object) -> None:
    """Check that a recipe's loss returned a floating-point scalar."""
    if isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point():
        return
    what, remedy = describe(value), ""
    if isinstance(value, Mapping):
        what = f"a dict of {', '.join(map(str, value))}"
        remedy = (
            " A dict of losses is tried before the first step, on copies of model and loss: let "
            "copy.deepcopy copy them, or return the sum."
        )
    raise UserError(
        f"The recipe's loss{defined_at(loss)} returned {what}; it must be a scalar tensor, the "
        f"mean over the samples of the batch.{remedy}"
    )


def check_trainable(value: Any, loss: object) -> None:
    """Check that a recipe's loss of training samples is a scalar with a gradient."""
    check_loss(value, loss)
    if not value.requires_grad:
        raise UserError(
            f"The recipe's loss{defined_at(loss)} has no gradient: it does not depend on any "
            "weight. Leave out .detach(), .item(), .argmax() and NumPy between the weights and the "
            "loss."
        )
