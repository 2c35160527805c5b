"""One optimizer step: micro-steps, the loss that each goes backward from, clipping, update."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from samestep.base.errors import UserError, blame, defined_at, listed, made_by
from samestep.base.phases import Phases, tell_end_of_autograd
from samestep.base.settings import Settings
from samestep.base.trees import describe, map_tensors
from samestep.core.data.keyed_random import RankSeeds
from samestep.core.data.order import Block, cut_block, cut_rows
from samestep.core.learner.agreement import may_draw
from samestep.core.learner.apply import call, with_parts
from samestep.core.learner.device import AUTOCAST, autocast
from samestep.core.learner.model_state import hooked_parameters
from samestep.core.learner.optimizer import Update, clip_gradients
from samestep.core.learner.prepare import without_sync
from samestep.core.training.metrics import StepOutputs, remedy_of
from samestep.core.training.work import Learner, StepResult
from samestep.launch.ranks.mesh import any_sharded
from samestep.launch.ranks.world import World

CallModel = Callable[[Block], Any]
"""Micro-step → the model's outputs."""


class EagerStep:
    """Take steps one by one with PyTorch's own autograd."""

    steps_per_call: int = 1

    def __init__(
        self,
        learner: Learner,
        settings: Settings,
        world: World,
        batch_size: int,
        phases: Phases | None = None,
        objective: "Objective | None" = None,
    ) -> None:
        self._learner, self._settings, self._world = learner, settings, world
        self._objective = objective or Objective(learner, settings, world)
        self._phases = phases or Phases()
        self._parameters = [p for p in learner.model.parameters() if p.requires_grad]
        self._hooked = hooked_parameters(learner.model)
        self._batch_size = batch_size
        self._together = settings.forwards_together and world.world_size > 1
        self._cut = partial(
            cut_rows, batch_size=batch_size, world_size=world.world_size, together=self._together
        )
        self._overlaps = world.connected
        """Whether gradients are sent off within the backward, which then waits for them."""
        self._unchecked = world.connected and not settings.allows_unused
        """Whether no step has shown yet that the loss depends on all parameters."""
        self._clip = partial(
            clip_gradients,
            self._parameters,
            settings.clip_norm,
            world if any_sharded(learner.model) else None,
        )
        self._update = Update(
            learner.optimizer,
            learner.scaler,
            learner.optimizer_maker,
            scheduled=learner.scheduler is not None,
            checks=settings.self_check,
        )
        self._update_draws = "optimizer" in learner.own and may_draw(learner.optimizer)
        self._seen: list[StepOutputs] = []

    def __call__(self, block: Block, step: int, lrs: list[float], *, want_norm: bool) -> StepResult:
        """Take the one step of this block, as `Step` says."""
        learner, seeds = self._learner, self._objective.seeds
        seeds.begin(step)
        for parameter in self._parameters:
            parameter.grad = None
        loss, terms = self._backward(block)
        if self._unchecked:
            self._unchecked = False
            check_used(learner.model)
        if learner.scaler is not None:
            learner.scaler.unscale_(learner.optimizer)
        clips = want_norm or self._settings.clip_norm is not None
        norms = [self._clip()] if clips else None
        if self._update_draws:
            seeds.begin_update()
        self._update(lrs[0])
        if self._update_draws:
            seeds.end_update()
        if learner.average is not None:
            learner.average.update()
        self._phases.lap("optimizer")
        self._objective.outputs = None
        outputs, self._seen = self._seen, []
        return StepResult([loss], norms, terms=None if terms is None else [terms], seen=outputs)

    def _backward(self, block: Block) -> tuple[Tensor, Tensor | None]:
        """Add up the gradients of this rank's micro-steps; return the step's loss and its terms."""
        objective, parts = self._objective, self._micro_steps(block)
        objective.begin(parts, block.global_size)
        weights, last = objective.weigh(parts), len(parts) - 1
        total: Tensor | None = None
        for number, (part, weight) in enumerate(zip(parts, weights, strict=True)):
            try:
                if number < last:
                    with without_sync(self._learner.wrapped):
                        loss = self._micro_step(part, weight)
                else:
                    loss = self._micro_step(part, weight)
            except Exception as error:
                objective.explain(error, part.inputs, part.targets)
            total = loss if total is None else total + loss
        assert total is not None
        return objective.mean(self._of_ranks(total), block.global_size)

    def _micro_steps(self, block: Block) -> Sequence[Block]:
        """Return a step's micro-steps, cut from it unless they were read one by one."""
        if block.parts:
            return block.parts
        if block.rows <= self._batch_size and not self._together:
            return (block,)
        return cut_block(block, self._cut(block.rows, block.global_size))

    def _micro_step(self, part: Block, weight: Any) -> Tensor:
        """Go backward from a micro-step; return its loss."""
        loss, reported = self._loss(part, weight)
        if self._learner.measured and part.weight:
            self._seen.append(self._objective.seen(part))
        versions = [p._version for p in self._hooked.values()]  # noqa: SLF001
        phases = self._phases
        last = "backward"
        phases.lap("forward")
        if self._overlaps and loss.requires_grad:
            tell_end_of_autograd(loss, lambda: phases.lap("backward"))
            last = "all_reduce"
        loss.backward()  # type: ignore[no-untyped-call]
        phases.lap(last)
        check_unchanged(self._hooked, versions)
        return reported

    def _loss(self, part: Block, weight: Any) -> tuple[Tensor, Tensor]:
        return self._objective.loss(part, weight)

    def _of_ranks(self, total: Tensor) -> Tensor:
        return self._objective.of_rank(total)


def plain_call(learner: Learner) -> CallModel:
    """Return a function that calls the wrapped model with a micro-step's inputs."""
    model = learner.wrapped

    def call_part(part: Block) -> Any:
        inputs = part.inputs
        return call(model, inputs, learner.applied) if isinstance(inputs, dict) else model(inputs)

    return call_part


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
        self._casts = settings.precision in AUTOCAST
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
        """Return the scaled loss for a micro-step's backward, and the loss to add to the step's."""
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
    if unused := [name for name, p in named if p.requires_grad and p.grad is None]:
        raise UserError(
            f"The loss does not depend on {listed(unused)}, so ranks would wait for a gradient "
            "that never comes. Use these parameters in forward, or freeze them with "
            f"requires_grad_(False){or_else}."
        )


def check_unchanged(hooked: Mapping[str, Tensor], versions: Sequence[int]) -> None:
    """Check that no hook has changed its parameter since they all had `versions`."""
    names = [n for n, v in zip(hooked, versions, strict=True) if hooked[n]._version != v]  # noqa: SLF001
    if names:
        hooks = (hooked[names[0]]._post_accumulate_grad_hooks or {}).values()  # noqa: SLF001
        raise UserError(
            f"A hook{defined_at(*hooks)} changes {listed(names)} in the backward pass, by one "
            "rank's gradients. If it steps an optimizer, as LOMO's does, return one from "
            "Recipe(optimizer=…) that steps after backward, so that checkpoints hold its state."
        )


def check_loss(value: Any, loss: object) -> None:
    """Check that a recipe's loss returned a floating-point scalar."""
    if isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point():
        return
    returned = describe(value)
    remedy = ""
    if isinstance(value, Mapping):
        returned = f"a dict of {', '.join(map(str, value))}"
        remedy = (
            " A dict of losses is tried before the first step, on copies of model and loss: let "
            "copy.deepcopy copy them, or return the sum."
        )
    raise UserError(
        f"The recipe's loss{defined_at(loss)} returned {returned}; it must be a scalar tensor, "
        f"the mean over the samples of the batch.{remedy}"
    )


def check_trainable(value: Any, loss: object) -> None:
    """Check that a recipe's loss of training samples is a scalar with a gradient."""
    check_loss(value, loss)
    if not value.requires_grad:
        raise UserError(
            f"The recipe's loss{defined_at(loss)} has no gradient: it does not depend on any "
            "weight. Use no .detach(), .item(), .argmax() or NumPy between weights and loss."
        )
