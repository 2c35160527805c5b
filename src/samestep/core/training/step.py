"""One optimizer step: micro-steps, backward, clipping, update."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from samestep.base.autograd import tell_end_of_autograd
from samestep.base.errors import blame, made_by
from samestep.base.phases import Phases
from samestep.base.settings import Settings
from samestep.base.trees import check_rows, describe, map_tensors, narrow
from samestep.core.data.blocks import Block, cut_rows
from samestep.core.data.keyed_random import mix, mix_next
from samestep.core.training.alike import (
    may_draw,
    rng_state,
    seed_rank,
    seed_torch,
    seed_update,
    set_rng_state,
)
from samestep.core.training.apply import as_scalar, call, of_counted, with_parts
from samestep.core.training.buffers import keep_buffers
from samestep.core.training.device import autocast, autocast_dtype
from samestep.core.training.learner import Learner, StepResult
from samestep.core.training.loss_checks import check_trainable, check_used
from samestep.core.training.metrics import StepOutputs, remedy_of
from samestep.core.training.optimizer import Update
from samestep.core.training.prepare import share_buffers, without_sync
from samestep.core.training.whole_batch import OutputGradient, WholeBatch
from samestep.launch.ranks.mesh import any_sharded, parts_of_rank, total_norm
from samestep.launch.ranks.world import World

Weight = float | Tensor | OutputGradient
Weights = Sequence[tuple[Weight, Tensor | None]]
"""Of each micro-step: what its loss is multiplied by, and its terms where ranks count them. Of a
loss over the whole batch: the gradient of the micro-step's outputs."""


_AS_IT_IS = contextlib.nullcontext()


def _call(function: Callable[[], Any] = lambda: None) -> Any:
    return function()


class EagerStep:
    """Take steps one by one with PyTorch's own autograd."""

    steps_per_call: int = 1
    compiled_sizes: frozenset[int] | None = None
    """Rows of the micro-steps that run compiled, if the model is compiled for some."""

    def __init__(
        self,
        learner: Learner,
        settings: Settings,
        world: World,
        batch_size: int,
        phases: Phases | None = None,
    ) -> None:
        self._learner, self._world, self._batch_size = learner, world, batch_size
        self._settings = settings
        self._phases = phases or Phases()
        self._casts = autocast_dtype(settings.precision) is not None
        self._update = Update(
            learner.optimizer,
            learner.scaler,
            learner.optimizer_maker,
            scheduled=learner.scheduler is not None,
            checks=settings.self_check,
        )
        # Whether the update may draw random numbers.
        self._draws = "optimizer" in learner.own and may_draw(learner.optimizer)
        self._rank_seed = mix(settings.seed, world.rank)
        self._agreed, self._step = False, 0
        self._outputs: Any = None
        self._slot = 0
        """Of carried state: the first slot of the next micro-step."""
        self._slots: range | None = None
        """The slots of the present one; None where its samples only stand in."""
        self._due: Sequence[tuple[int, OutputGradient]] = ()
        """Of a loss over the whole batch: virtual rank and gradient of each micro-step."""
        self._seen: list[StepOutputs] = []
        self._together = settings.forwards_together and world.world_size > 1
        self._sharded = any_sharded(learner.model)
        self._undoes = world.elastic and any(True for _ in learner.model.buffers())
        self._cut = partial(
            cut_rows, batch_size=batch_size, world_size=world.world_size, together=self._together
        )
        self._overlaps = world.connected
        """Whether gradients are sent off within the backward, which then waits for them."""
        self._unchecked = world.connected and not settings.allows_unused
        self._parameters = [p for p in learner.model.parameters() if p.requires_grad]

    def __call__(self, block: Block, step: int, lrs: list[float], *, want_norm: bool) -> StepResult:
        """Take the one step of this block, as `Step` says."""
        learner, scaler = self._learner, self._learner.scaler
        self._seed(step)
        for parameter in self._parameters:
            parameter.grad = None
        if learner.counter is not None:
            learner.counter.grad = None
        carried = learner.carried
        if carried is not None:
            carried.begin(block.first_step, block.global_size, step)
        loss, terms = self._undone(block) if self._undoes else self._backward(block)
        if carried is not None:
            carried.settle()
        if self._unchecked:
            self._unchecked = False
            check_used(learner.model)
        if scaler is not None:
            scaler.unscale_(learner.optimizer)
        norm = self._clip(want_norm=want_norm)
        if self._draws:
            self._seed_update()
        self._update(lrs[0])
        if self._draws:
            seed_rank(mix(self._settings.seed, step + 1), self._world.rank)
        if learner.average is not None:
            learner.average.update()
        self._phases.lap("optimizer")
        norms, self._outputs = None if norm is None else [norm], None
        seen, self._seen = self._seen, []
        return StepResult([loss], norms, terms=None if terms is None else [terms], seen=seen)

    def _undone(self, block: Block) -> tuple[Tensor, Tensor | None]:
        """Do as `_backward`; if it fails half-way, the model's buffers are as they were."""
        put_back = keep_buffers(self._learner.model)
        try:
            return self._backward(block)
        except Exception:
            put_back()
            raise

    def _backward(self, block: Block) -> tuple[Tensor, Tensor | None]:
        """Add up this rank's micro-steps; return its part of the mean loss, all ranks' terms.

        Where ranks outlive each other, the loss is that of all ranks.
        """
        if self._sharded:
            share_buffers(self._learner.model, self._world)  # DDP does it by itself
        total: Tensor | None = None
        parts = self._parts(block)
        if self._learner.over_batch:
            self._look_at_whole(parts, block.global_size)
        if self._learner.carried is not None:
            self._begin_part(parts[0].place)
        weights, last = self._weigh(parts), len(parts) - 1
        for number, (part, weight) in enumerate(zip(parts, weights, strict=True)):
            try:
                if number < last:
                    with without_sync(self._learner.wrapped):
                        loss = self._micro_step(part, *weight)
                else:
                    loss = self._micro_step(part, *weight)
            except Exception as error:
                self._tell(error, part.inputs, part.targets)
            total = loss if total is None else total + loss
        assert total is not None
        total = self._of_all_ranks(total)
        if self._learner.reduction == "sum":
            total = total / block.global_size
        if self._learner.terms is None:
            return total, None
        return self._over_terms(total, block.global_size)

    def _parts(self, block: Block) -> Sequence[Block]:
        """Return a step's micro-steps, cut from it unless they were read one by one."""
        if block.rows <= self._batch_size and not (block.parts or self._together):
            return (block,)
        if block.parts:
            return block.parts
        cuts = self._cut(block.rows, block.global_size)
        if len(cuts) == 1 and cuts[0] == (0, block.rows, block.rows):
            return (block,)
        check_rows((block.inputs, block.targets), block.rows)
        parts = []
        for start, count, counted in cuts:
            inputs = narrow(block.inputs, start, count)
            whole = block.targets is block.inputs
            targets = inputs if whole else narrow(block.targets, start, count)
            weight = block.weight if counted else 0.0
            step, size = block.first_step, block.global_size
            parts.append(Block(step, 1, inputs, targets, count, weight, size))
        return parts

    def _micro_step(self, part: Block, weight: Weight, terms: Tensor | None) -> Tensor:
        learner, inputs, targets = self._learner, part.inputs, part.targets
        if learner.carried is not None:
            self._take_state(part)
        told = None
        if isinstance(weight, OutputGradient):
            loss, told = self._go_on(part, weight), weight.loss
        else:
            compute = self._loss_of if self._agreed else self._first_loss
            if self.compiled_sizes is None:  # a context takes a measurable part of a small step
                loss = compute(inputs, targets)
            else:
                with self._as_compiled(part):
                    loss = compute(inputs, targets)
            if isinstance(weight, Tensor):
                loss = of_counted(loss, self._outputs, weight)
            told = with_parts(loss) * weight if learner.parts else None
            if isinstance(weight, Tensor) or weight != 1.0:
                loss = loss * weight
        if learner.measured and part.weight:
            made = self._outputs
            is_one = isinstance(made, Tensor)
            outputs = made.detach() if is_one else map_tensors(Tensor.detach, made)
            self._seen.append(StepOutputs(outputs, targets, part.rows, part.place))
        phases, last = self._phases, "backward"
        phases.lap("forward")
        if self._overlaps and loss.requires_grad:
            tell_end_of_autograd(loss, lambda: phases.lap("backward"))
            last = "all_reduce"
        scaler = None if learner.over_batch else learner.scaler  # that is scaled already
        scaled = loss if scaler is None else scaler.scale(loss)
        if learner.counter is not None:
            # These numbers are its gradient, and travel with those of the weights.
            numbers = loss.detach() if told is None else told
            numbers = self._travelling(numbers, terms, learner.counter.dtype)
            scaled = scaled + learner.counter.dot(numbers)
        scaled.backward()  # type: ignore[no-untyped-call]
        phases.lap(last)
        return loss.detach() if told is None else told

    def _take_state(self, part: Block) -> None:
        """Take the carried state of a micro-step's slots; the next one has the slots behind."""
        self._slots = None
        if part.weight:
            self._slots = range(self._slot, self._slot + part.rows)
            self._slot += part.rows

    def _made(self, inputs: Any) -> Any:
        """Return what the model makes of a micro-step; keep the state that it carries on."""
        learner = self._learner
        if learner.carried is None:
            return call(learner.wrapped, inputs, learner.applied)
        if self._slots is None:
            return learner.wrapped(inputs)
        outputs, left = learner.wrapped(inputs, learner.carried.given(self._slots))
        learner.carried.leave(self._slots, left, lambda: "The forward returned as carried state")
        return outputs

    def _as_compiled(self, part: Block) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which a compiled model runs compiled only for its usual sizes."""
        if self.compiled_sizes is None or part.rows in self.compiled_sizes:
            return _AS_IT_IS
        eager: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
        return eager

    def _look_at_whole(self, parts: Sequence[Block], global_size: int) -> None:
        """Compute a loss over the whole global batch, back to the outputs of each micro-step."""
        learner, world = self._learner, self._world
        agreed = _call if self._agreed else world.on_every
        kept = rng_state()
        keeps = self._keeps_graph(global_size)
        made = agreed(lambda: self._forward_all(parts, keeps=keeps))
        whole = WholeBatch(parts, made, world, len(learner.parts))
        self._seed_loss()
        # DDP divides by the world size, so undo that.
        times = world.world_size if self._overlaps else 1

        def scale(loss: Tensor) -> Tensor:
            loss = loss * times
            return loss if learner.scaler is None else learner.scaler.scale(loss)

        named = {} if self._agreed else dict(learner.model.named_parameters())
        due = agreed(lambda: whole.backward(self._loss_of_whole, scale, named))
        graphs = made if keeps else [None] * len(parts)
        self._due = [
            (part.place, replace(one, outputs=graph))
            for part, one, graph in zip(parts, due, graphs, strict=True)
        ]
        self._agreed = True
        set_rng_state(kept)
        self._seed(self._step)  # the second forward draws what the first one drew

    def _keeps_graph(self, global_size: int) -> bool:
        """Whether the first forward of a loss over the whole batch is the only one, on any rank."""
        return -(-global_size // self._world.world_size) <= self._batch_size

    def _forward_all(self, parts: Sequence[Block], *, keeps: bool) -> list[Any]:
        """Return the outputs of all micro-steps, with their graph if it is kept."""
        learner, made = self._learner, []
        if not keeps and self._overlaps:
            share_buffers(learner.model, self._world)  # DDP leaves it out without gradients
        put_back = _call if keeps else keep_buffers(learner.model)
        for place, micro_steps in groupby(parts, key=lambda part: part.place):
            self._begin_part(place)
            for part in micro_steps:
                if learner.carried is not None:
                    self._take_state(part)
                try:
                    with torch.set_grad_enabled(keeps), self._as_compiled(part):
                        made.append(self._forward(part.inputs))
                except Exception as error:
                    self._tell(error, part.inputs, part.targets)
            put_back()
        return made

    def _forward(self, inputs: Any) -> Any:
        """Return the outputs of a micro-step."""
        with autocast(self._settings.precision, self._world.device):
            self._outputs = self._made(inputs)
        torch.clear_autocast_cache()
        return self._outputs

    def _loss_of_whole(self, outputs: Any, targets: Any) -> Tensor:
        """Return the loss over the outputs and targets of all ranks."""
        learner = self._learner
        self._outputs = outputs
        try:
            with autocast(self._settings.precision, self._world.device):
                loss = learner.loss(outputs, targets)
        except Exception as error:
            self._tell(error, outputs, targets)
        check_trainable(loss, learner.loss)
        return loss

    def _go_on(self, part: Block, due: OutputGradient) -> Tensor:
        """Return what takes the gradient of a micro-step's outputs into the model."""
        if due.outputs is None:
            with self._as_compiled(part):
                self._forward(part.inputs)
        else:
            self._outputs = due.outputs
        loss = due.of(self._outputs)
        check_trainable(loss, self._learner.loss)
        return loss

    def _weights_of(self, parts: Sequence[Block]) -> Weights:
        """Return each micro-step's weight, and its terms where ranks count them.

        Ranks know the sum of the terms only after the backward: until then each term weighs 1 /
        global batch, and `_over_terms` corrects that.
        """
        world_size, count = self._world.world_size, self._learner.terms
        if self._learner.reduction == "sum":
            return [(p.weight * world_size, None) for p in parts]
        if count is None:
            # Each sample weighs 1 / global batch; DDP divides by the world size, so undo that.
            return [(p.weight * p.rows * world_size / p.global_size, None) for p in parts]
        like, size = self._parameters[0], parts[0].global_size
        found = [as_scalar(count(p.inputs, p.targets), like) * p.weight for p in parts]
        self._terms = torch.stack(found).sum() if len(found) > 1 else found[0]
        if world_size > 1:
            return [(mine * (world_size / size), mine) for mine in found]
        if len(parts) == 1:
            return [(1.0, None)]
        return [(mine / self._terms, None) for mine in found]

    def _weigh(self, parts: Sequence[Block]) -> Weights:
        """Return the weights; in the first step a mistake in any rank's terms raises on all."""
        if self._due:
            return [(due, None) for place, due in self._due if place == parts[0].place]
        if self._agreed or self._learner.terms is None:
            return self._weights_of(parts)
        return self._world.on_every(lambda: self._weights_of(parts))

    def _travelling(self, loss: Tensor, terms: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return what all ranks need of a micro-step: losses, if they are elastic, and terms."""
        found = [loss.to(dtype).view(-1)] if self._world.elastic else []
        if terms is not None:
            found.append(terms.view(1))
        return torch.cat(found) if len(found) > 1 else found[0]

    def _of_all_ranks(self, mine: Tensor) -> Tensor:
        """Return this rank's part of the loss; of elastic ranks, the loss of all.

        That came with the gradients' all-reduce, if it could.
        """
        if self._world.world_size > 1 and not self._learner.over_batch:  # on rank 0 as a whole
            mine = mine / self._world.world_size
        if not self._world.elastic:
            return mine
        counter = self._learner.counter
        if counter is None or self._learner.over_batch:
            return self._world.reduce(mine)
        assert counter.grad is not None
        return counter.grad[: mine.numel()].clone().view(mine.shape)

    def _over_terms(self, total: Tensor, global_size: int) -> tuple[Tensor, Tensor]:
        """Divide by the terms of all ranks, which came with the gradients' all-reduce."""
        counter = self._learner.counter
        if self._world.world_size == 1:
            return total, self._terms
        if counter is not None:
            assert counter.grad is not None
            terms = counter.grad.detach()[-1] * self._world.world_size
        else:
            terms = self._world.reduce(self._terms)
        mend = global_size / terms
        gradients = parts_of_rank(p.grad for p in self._parameters if p.grad is not None)
        torch._foreach_mul_(gradients, mend.to(gradients[0].device))
        return total * mend, terms

    def _loss_of(self, inputs: Any, targets: Any) -> Tensor:
        learner = self._learner
        if not self._casts:
            if learner.carried is None:
                self._outputs = call(learner.wrapped, inputs, learner.applied)
            else:
                self._outputs = self._made(inputs)
            return learner.loss(self._outputs, targets)
        with autocast(self._settings.precision, self._world.device):
            self._outputs = self._made(inputs)
            loss = learner.loss(self._outputs, targets)
        torch.clear_autocast_cache()  # a context that user code left open would keep these weights
        return loss

    def _first_loss(self, inputs: Any, targets: Any) -> Tensor:
        """Return the loss of the first batch; a mistake on any rank raises on all of them."""

        def checked() -> Tensor:
            try:
                loss = self._loss_of(inputs, targets)
            except Exception as error:
                self._tell(error, inputs, targets)
            with made_by(*self._learner.makers):
                check_trainable(loss, self._learner.loss)
            return loss

        loss = self._world.on_every(checked)
        self._agreed = True
        return loss

    def _tell(self, error: Exception, inputs: Any, targets: Any) -> NoReturn:
        if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise error
        when = f"at step {self._step + 1}" if self._agreed else "on the first batch"
        made = self._outputs  # None where the model has not come to an end
        remedy = "" if made is None else remedy_of(error, made, targets, self._learner.loss)
        blame(
            f"The recipe's model or loss failed {when}, with inputs {describe(inputs)} and "
            f"targets {describe(targets)} on this rank",
            error,
            *self._learner.makers,
            remedy=remedy,
        )

    def _clip(self, *, want_norm: bool) -> Tensor | None:
        most = self._settings.clip_norm
        if most is None and not want_norm:
            return None
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if self._sharded:
            norm = total_norm(gradients, self._world)
            if most is not None:
                factor = (most / (norm + 1e-6)).clamp(max=1.0)  # as clip_grad_norm_ has it
                torch._foreach_mul_(parts_of_rank(gradients), factor)
            return norm
        try:
            if most is None:
                return nn.utils.get_total_norm(gradients)
            return nn.utils.clip_grad_norm_(
                self._parameters, most, foreach=len(self._parameters) > 1
            )
        except NotImplementedError:  # sparse gradients have no norm, but their values have
            dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
            norm = nn.utils.get_total_norm(dense)
            if most is not None:
                nn.utils.clip_grads_with_norm_(self._parameters, most, norm, foreach=False)
            return norm

    def _seed(self, step: int) -> None:
        """Seed torch's generator for a step of this rank, so that dropout resumes exactly."""
        self._step = step
        seed_torch(mix_next(self._rank_seed, step), self._world.device)

    def _begin_part(self, part: int) -> None:
        """Begin the forwards of a virtual rank, or of a rank without virtual ones."""
        if self._learner.carried is not None:
            part = part if self._world.virtual_ranks else self._world.rank
            self._slot = self._learner.carried.first_of(part)

    def _seed_loss(self) -> None:
        """Seed what a loss over the whole batch draws: the same on all ranks."""
        seed_update(self._settings.seed, self._step, self._world.device, 1)

    def _seed_update(self) -> None:
        seed_update(self._settings.seed, self._step, self._world.device)
