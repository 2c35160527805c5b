"""One optimizer step: micro-steps, backward, clipping, update."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from samestep.data.blocks import Block
from samestep.data.keyed_random import mix, mix_next
from samestep.data.order import share
from samestep.data.trees import check_rows, describe, narrow
from samestep.errors import UserError, blame, defined_at
from samestep.ranks.world import World
from samestep.run.records import Record
from samestep.settings import Settings
from samestep.training.optimizer import Update, set_lr
from samestep.training.parallel import tell_end_of_autograd, without_sync
from samestep.training.phases import Phases
from samestep.training.precision import autocast, autocast_dtype


@dataclass(frozen=True, kw_only=True)
class Trainee:
    """What a step changes: the model, the same model as wrapped for all ranks, the optimizer."""

    model: nn.Module
    wrapped: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    loss: Callable[[Any, Any], Tensor]
    place: str = ""
    """Where the user builds the model, for a message: " (FILE:LINE)"."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What consecutive steps gave, left on the device: reading it would make the host wait."""

    losses: Sequence[Tensor]
    """This rank's part of each step's mean loss; over all ranks they add up to it."""
    grad_norms: Sequence[Tensor] | Tensor | None
    """Gradient norm of each step before clipping, if it was asked for."""
    notes: tuple[Record, ...] = ()
    """`compile` records of what was compiled in this call."""


def check_used(model: nn.Module) -> None:
    """Check, after the first backward, that DDP will not wait for a gradient that never comes.

    Raises:
        UserError: the loss does not depend on a parameter that is to be trained.
    """
    named = model.named_parameters()
    unused = [name for name, p in named if p.requires_grad and p.grad is None]
    if unused:
        raise UserError(
            f"The loss does not depend on {', '.join(unused[:3])}"
            f"{f' and {len(unused) - 3} more' if len(unused) > 3 else ''}, so ranks would wait "
            "for a gradient that never comes. Use these parameters in forward, or freeze them "
            "with requires_grad_(False)."
        )


def check_loss(value: Any, loss: object) -> None:
    """Check what a recipe's loss returned.

    Raises:
        UserError: it is no scalar tensor of a floating-point type.
    """
    if isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point():
        return
    raise UserError(
        f"The recipe's loss{defined_at(loss)} returned {describe(value)}; it must be a scalar "
        "tensor, the mean over the samples of the batch."
    )


def seed_torch(drawn: int, device: torch.device) -> None:
    """Seed torch's generator of a device, and that of the CPU.

    `torch.manual_seed` seeds those of all devices: ten times the work, at every step.
    """
    torch.default_generator.manual_seed(drawn)
    if device.type == "cuda":
        # There are no generators before; later it returns at once.
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.default_generators[device.index or 0].manual_seed(drawn)
    elif device.type == "mps":
        torch.mps.manual_seed(drawn)


class EagerStep:
    """Run steps one by one with PyTorch's own autograd."""

    steps_per_call: int = 1

    def __init__(
        self,
        trainee: Trainee,
        settings: Settings,
        world: World,
        batch_size: int,
        phases: Phases | None = None,
    ) -> None:
        self._trainee, self._world, self._batch_size = trainee, world, batch_size
        self._settings = settings
        self._phases = phases or Phases()
        self._casts = autocast_dtype(settings.precision) is not None
        self._update = Update(trainee.optimizer)
        self._rank_seed = mix(settings.seed, world.rank)
        self._agreed, self._step = False, 0
        self._together = settings.sync_batchnorm and world.world_size > 1
        self._unchecked = world.connected
        self._parameters = [p for p in trainee.model.parameters() if p.requires_grad]

    def __call__(self, block: Block, step: int, lrs: list[float], *, want_norm: bool) -> StepResult:
        """Take the one step of this block.

        Args:
            block: the samples of this rank.
            step: steps taken before this one in the run.
            lrs: the learning rate of the step.
            want_norm: whether the gradient norm is needed also where nothing is clipped.
        """
        trainee, scaler = self._trainee, self._trainee.scaler
        self._seed(step)
        for parameter in self._parameters:
            parameter.grad = None
        loss = self._backward(block)
        if self._unchecked:
            self._unchecked = False
            check_used(trainee.model)
        if scaler is not None:
            scaler.unscale_(trainee.optimizer)
        norm = self._clip(want_norm=want_norm)
        if scaler is None:
            self._update(lrs[0])
        else:
            set_lr(trainee.optimizer, lrs[0])
            scaler.step(trainee.optimizer)
            scaler.update()
        self._phases.lap("optimizer")
        return StepResult([loss], None if norm is None else [norm])

    def _backward(self, block: Block) -> Tensor:
        """Add up the gradients of this rank's micro-steps; return its part of the mean loss."""
        world_size = self._world.world_size
        total: Tensor | None = None
        parts = self._parts(block)
        if len(parts) > 1:
            check_rows((block.inputs, block.targets), block.rows)
        for number, (start, count, counted) in enumerate(parts, start=1):
            if count == block.rows:
                inputs, targets = block.inputs, block.targets
            else:
                inputs = narrow(block.inputs, start, count)
                targets = narrow(block.targets, start, count)
            # Each sample weighs 1 / global batch; DDP divides by the world size, so undo that.
            weight = block.weight * counted * world_size / block.global_size
            try:
                if number < len(parts):
                    with without_sync(self._trainee.wrapped):
                        loss = self._micro_step(inputs, targets, weight)
                else:
                    loss = self._micro_step(inputs, targets, weight)
            except Exception as error:
                self._tell(error, inputs, targets)
            total = loss if total is None else total + loss
        assert total is not None
        return total / world_size if world_size > 1 else total

    def _parts(self, block: Block) -> list[tuple[int, int, int]]:
        """Return each micro-step's first row, its rows, and how many of them count."""
        rows, batch = block.rows, self._batch_size
        if not self._together:
            starts = range(0, rows, batch)
            return [(s, min(batch, rows - s), min(batch, rows - s)) for s in starts]
        # Forwards talk to those of the other ranks, so every rank needs equally many of them.
        largest = -(-block.global_size // self._world.world_size)
        num = -(-largest // batch)
        shares = [share(range(rows), part, num) for part in range(num)]
        return [(s.start, len(s), len(s)) if len(s) else (0, 1, 0) for s in shares]

    def _micro_step(self, inputs: Any, targets: Any, weight: float) -> Tensor:
        trainee = self._trainee
        loss = self._loss_of(inputs, targets) if self._agreed else self._first_loss(inputs, targets)
        if weight != 1.0:
            loss = loss * weight
        phases, last = self._phases, "backward"
        phases.lap("forward")
        if self._world.connected and loss.requires_grad:
            tell_end_of_autograd(loss, lambda: phases.lap("backward"))
            last = "all_reduce"
        (loss if trainee.scaler is None else trainee.scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
        phases.lap(last)
        return loss.detach()

    def _loss_of(self, inputs: Any, targets: Any) -> Tensor:
        trainee = self._trainee
        if not self._casts:
            return trainee.loss(trainee.wrapped(inputs), targets)
        with autocast(self._settings.precision, self._world.device):
            return trainee.loss(trainee.wrapped(inputs), targets)

    def _first_loss(self, inputs: Any, targets: Any) -> Tensor:
        """Return the loss of the first batch, once every rank has one that it can train on.

        Raises:
            UserError: on every rank, what does not fit together on any.
        """

        def checked() -> Tensor:
            try:
                loss = self._loss_of(inputs, targets)
            except Exception as error:
                self._tell(error, inputs, targets)
            check_loss(loss, self._trainee.loss)
            if not loss.requires_grad:
                raise UserError(
                    f"The recipe's loss{defined_at(self._trainee.loss)} has no gradient: it does "
                    "not depend on any weight. Leave out .detach(), .item(), .argmax() and NumPy "
                    "between the weights and the loss."
                )
            return loss

        loss = self._world.on_every(checked)
        self._agreed = True
        return loss

    def _tell(self, error: Exception, inputs: Any, targets: Any) -> NoReturn:
        """Raise what the user is told of an error in a micro-step."""
        if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise error
        when = f"at step {self._step + 1}" if self._agreed else "on the first batch"
        blame(
            f"The recipe's model or loss failed {when}, with inputs {describe(inputs)} and "
            f"targets {describe(targets)} on this rank",
            error,
            self._trainee.place,
        )

    def _clip(self, *, want_norm: bool) -> Tensor | None:
        if self._settings.clip_norm is not None:
            return nn.utils.clip_grad_norm_(
                self._parameters, self._settings.clip_norm, foreach=len(self._parameters) > 1
            )
        if not want_norm:
            return None
        return nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])

    def _seed(self, step: int) -> None:
        """Seed torch's generator for a step, so that dropout resumes exactly.

        Ranks draw different numbers, since they hold different samples.
        """
        self._step = step
        seed_torch(mix_next(self._rank_seed, step), self._world.device)
