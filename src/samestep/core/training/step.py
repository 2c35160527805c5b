"""One optimizer step: micro-steps, backward, clipping, update."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from samestep.base.phases import Phases, tell_end_of_autograd
from samestep.base.settings import Settings
from samestep.core.data.blocks import Block, cut_block, cut_rows
from samestep.core.training.alike import may_draw
from samestep.core.training.learner import Learner, StepResult
from samestep.core.training.metrics import StepOutputs
from samestep.core.training.objective import Objective, check_used
from samestep.core.training.optimizer import Update, clip_gradients
from samestep.core.training.prepare import without_sync
from samestep.launch.ranks.mesh import any_sharded
from samestep.launch.ranks.world import World


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
        objective: Objective | None = None,
    ) -> None:
        """Take steps in micro-steps of at most `batch_size` samples on this rank."""
        self._learner, self._settings, self._world = learner, settings, world
        self._objective = objective or Objective(learner, settings, world)
        self._phases = phases or Phases()
        self._parameters = [p for p in learner.model.parameters() if p.requires_grad]
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
        seen, self._seen = self._seen, []
        return StepResult([loss], norms, terms=None if terms is None else [terms], seen=seen)

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
        phases, last = self._phases, "backward"
        phases.lap("forward")
        if self._overlaps and loss.requires_grad:
            tell_end_of_autograd(loss, lambda: phases.lap("backward"))
            last = "all_reduce"
        loss.backward()  # type: ignore[no-untyped-call]
        phases.lap(last)
        return reported

    def _loss(self, part: Block, weight: Any) -> tuple[Tensor, Tensor]:
        """Return what a micro-step goes backward from, and the loss to add to the step's."""
        return self._objective.loss(part, weight)

    def _of_ranks(self, total: Tensor) -> Tensor:
        """Return the step's loss, as far as this rank knows it: its own part."""
        return self._objective.of_rank(total)
