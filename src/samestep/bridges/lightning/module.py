"""A recipe's model, loss, optimizer and learning rates as a LightningModule."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn

from samestep.base.errors import UserError, blame, defined_at, made_by
from samestep.base.settings import Settings
from samestep.base.trees import describe, map_tensors
from samestep.bridges.lightning.datamodule import MicroBatch, choose_options, resolve, world_of
from samestep.core.data.keyed_random import (
    mix,
    mix_next,
    seed_alike,
    seed_rank,
    seed_torch,
    seed_update,
)
from samestep.core.data.source import Batch
from samestep.core.learner.agreement import random_numbers
from samestep.core.learner.apply import (
    Moment,
    call,
    evaluating,
    measure_of,
    of_counted,
    parts_of,
    summed,
    terms_of,
    timed,
    with_parts,
)
from samestep.core.learner.averages import OwnAverage
from samestep.core.learner.optimizer import has_modes, optimizer_of
from samestep.core.learner.prepare import place_loss, prepare, share_buffers
from samestep.core.plan import GroupRates, Plan, learning_rate
from samestep.core.recipe import Recipe
from samestep.core.session.trained_model import open_checkpoint
from samestep.core.training.evaluation import Totals
from samestep.core.training.metrics import StepOutputs
from samestep.core.training.step import check_trainable
from samestep.launch.ranks.world import World


def check_recipe(recipe: Recipe) -> None:
    """Refuse a recipe that needs samestep's own loop."""
    if recipe.carry is not None:
        raise UserError(
            "Recipe(carry=…) keeps state from step to step, which Lightning's loop does not "
            "support: use --engine native."
        )
    if recipe.loss_over != "samples":
        raise UserError(
            f"Recipe(loss_over={recipe.loss_over!r}) gathers the outputs of all ranks, which "
            "Lightning's loop does not support: use --engine native."
        )
    if asked := {*recipe.schedule_asks()} & {"optimizer", "metrics"}:
        what = "is a scheduler of PyTorch" if "optimizer" in asked else "reads the metrics"
        raise UserError(
            f"The recipe's schedule{defined_at(recipe.schedule)} {what}. Lightning's engine "
            "would set the next rate before the validation, and save the scheduler's state where "
            "samestep's own loop does not look: use --engine native."
        )


class LitRecipe(pl.LightningModule):
    """A recipe's model and loss, its optimizer and learning rates.

    Logged are `train_loss`, the mean over the global batch, and `val_…` and `test_…`, means over
    all samples of all ranks. It needs `LitData` of the same recipe and settings as its data.

    Args:
        recipe: a recipe, or its name, or the path of its file.
        settings: how to train; the recipe's defaults if not given.
        options: the recipe's options; their defaults if not given.
        model: the model, if it is built already.
    """

    def __init__(
        self,
        recipe: Recipe | str,
        settings: Settings | None = None,
        options: object = None,
        model: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.recipe, self.settings = resolve(recipe, settings)
        if model is None:
            seed_alike(self.settings.seed)
            chosen = choose_options(self.recipe, options)
            self.recipe = self.recipe.with_options(chosen)
            model = self.recipe.build_model(chosen)
            model = prepare(model, self.settings, World(), torch.float32)
        self.model = model
        check_recipe(self.recipe)
        if self.recipe.after_epoch is not None:
            raise UserError(
                "LitRecipe does not call Recipe(after_epoch=…): use `samestep train --engine "
                "lightning`, which does, or on_train_epoch_end."
            )
        self.step_loss: Tensor | float = 0.0
        """This rank's part of the mean loss of the running step, or of the last one; a vector where
        the loss is a sum of named ones."""
        self.parts: Sequence[str] | None = None
        """Their names, as far as they are known."""
        self.measure = measure_of(self.recipe, model)
        self.means: dict[str, float] = {}
        """What the latest validation or test measured, and `samples`."""
        self.moment = Moment()
        """What a loss that asks for it gets."""
        self._totals: Totals
        self._drawn = ExitStack()
        """The random numbers of a validation or test."""
        self._loss: Callable[[Any, Any], Tensor] = self.recipe.loss
        self._new_step = True
        self._seen: list[StepOutputs] = []

    @classmethod
    def from_run(cls, run: str | Path, name: str = "best") -> "LitRecipe":
        """Return the model of a run's checkpoint, of whichever engine wrote it.

        Args:
            run: the run's directory.
            name: "best", "last", or a file name in its checkpoints/.

        Raises:
            UserError: there is no such run or checkpoint, or it does not fit.
        """
        opened = open_checkpoint(Path(run), name, device="cpu")
        model = prepare(opened.model.train(), opened.settings, World(), torch.float32)
        return cls(opened.recipe, opened.settings, opened.options, model=model)

    def forward(self, inputs: Any) -> Any:
        """Return the model's outputs."""
        forward = self.recipe.forward
        if forward is None:
            return call(self.model, inputs)
        return timed(forward, self.moment)(self.model, inputs)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the optimizer of the settings, and the learning rate of each step."""
        plan = getattr(getattr(self.trainer, "datamodule", None), "plan", None)
        if not isinstance(plan, Plan):
            raise UserError(
                "LitRecipe trains on LitData of the same recipe: trainer.fit(LitRecipe(recipe), "
                "datamodule=LitData(recipe))."
            )
        optimizer, settings = self.make_optimizer(plan), self.settings
        if self.recipe.optimizer is not None:
            _compute_first(optimizer)

        def factor(step: int, group: int) -> float:
            lr = learning_rate(plan, settings, step)
            return (lr.each[group] if isinstance(lr, GroupRates) else lr) / plan.lr

        groups = range(len(optimizer.param_groups))
        rates = torch.optim.lr_scheduler.LambdaLR(
            optimizer, [partial(factor, group=group) for group in groups]
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": rates, "interval": "step", "name": "lr"},
        }

    def make_optimizer(self, plan: Plan) -> torch.optim.Optimizer:
        """Return the optimizer of the settings."""
        # Lightning's mixed precision takes a fused optimizer to unscale by itself, and cannot clip.
        mixed = str(self.trainer.precision).endswith("-mixed")
        return optimizer_of(
            self.recipe, self.model, self.settings, plan.lr, self.device, fuse=not mixed
        )

    def on_train_start(self) -> None:
        """Take what the loss holds to where the model is."""
        placed = place_loss(self.recipe.loss, self.device, self._dtype_of_weights())
        self._loss = summed(timed(placed, self.moment), self.recipe.loss_weights)

    def on_train_batch_start(self, batch: MicroBatch, batch_idx: int) -> None:
        """Seed a step as samestep's loop does, so that dropout is the same and resumes exactly."""
        if self._new_step:
            rank_seed = mix(self.settings.seed, self.trainer.global_rank)
            seed_torch(mix_next(rank_seed, self.trainer.global_step), self.device)
            self.step_loss = 0.0
            self.moment.step = self.trainer.global_step
            self.moment.epoch = self.trainer.current_epoch
        self._new_step = batch.last

    def training_step(self, batch: MicroBatch, batch_idx: int) -> Tensor:
        """Return the loss, so weighted that the step's gradient is the global batch's."""
        makers = self.recipe.model, self.recipe.data
        try:
            outputs = self(batch.inputs)
            loss = self._loss(outputs, batch.targets)
        except Exception as error:
            blame(
                f"The recipe's model or loss failed, with inputs {describe(batch.inputs)} and "
                f"targets {describe(batch.targets)} on this rank",
                error,
                *makers,
            )
        with made_by(*makers):
            check_trainable(loss, self.recipe.loss)
        if self.recipe.metrics and batch.weight and self.recipe.batch_transform is None:
            detached = map_tensors(Tensor.detach, outputs)
            self._seen.append(StepOutputs(detached, batch.targets, batch.rows))
        if parts := parts_of(loss):
            self.parts = tuple(parts)
        weight: Tensor | float = batch.weight
        if batch.share is not None:
            weight = batch.share
            loss = of_counted(loss, outputs, weight)
        value, mean = with_parts(loss) if parts else loss.detach(), 1
        if self.recipe.reduction == "sum":
            weight, mean = float(batch.weight > 0), batch.size
        self.step_loss = self.step_loss + value * weight / mean
        # Lightning divides by the micro-steps and DDP by the ranks: both are undone.
        return loss * weight * (self.trainer.accumulate_grad_batches * self.trainer.world_size)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Seed what a recipe's own optimizer draws: the same numbers on all ranks."""
        if self.recipe.optimizer is not None:
            seed_update(self.settings.seed, self.trainer.global_step, self.device)

    def take_seen(self) -> list[StepOutputs]:
        """Return the outputs of the micro-steps since the last call."""
        seen, self._seen = self._seen, []
        return seen

    def on_train_batch_end(self, outputs: Any, batch: MicroBatch, batch_idx: int) -> None:
        """Log the loss of the global batch where the Trainer logs."""
        if batch.last and self.recipe.optimizer is not None:
            seed_rank(mix(self.settings.seed, self.trainer.global_step), self.trainer.global_rank)
        every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if batch.last and every and self.trainer.global_step % every == 0:
            loss = torch.as_tensor(self.step_loss, device=self.device)
            values = world_of(self.trainer).reduce(loss).view(-1)
            names = [f"train_{name}" for name in ("loss", *(self.parts or ()))]
            self.log_dict(dict(zip(names, values, strict=True)), prog_bar=True)

    def on_validation_start(self) -> None:
        """Begin to count, with the weights and the draws of samestep's own evaluations."""
        world = world_of(self.trainer)
        drawn = random_numbers(mix(self.settings.seed, self.trainer.global_rank))
        self._drawn.enter_context(drawn)
        share_buffers(self.model, world)
        for optimizer in self.trainer.optimizers if self.trainer.state.fn == "fit" else ():
            if has_modes(optimizer):
                own = OwnAverage(self.model, optimizer, has_stepped=self.trainer.global_step > 0)
                self._drawn.enter_context(own.in_place())
        dtype, has_own = self._dtype_of_weights(), self.recipe.evaluation_loss is not None
        placed = place_loss(self.recipe.evaluated_loss, self.device, dtype)
        self._totals = Totals(
            evaluating(self.recipe, placed, self.moment),
            self.recipe.metrics,
            world,
            terms=terms_of(self.recipe),
            reduction=self.recipe.reduction,
            parts=None if has_own else self.parts,
            measure=self.measure,
        )

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Count a batch."""
        seed = mix(self.settings.seed, self.trainer.global_rank, batch_idx)
        seed_torch(seed, self.device)
        try:
            outputs = self(batch.inputs)
        except Exception as error:
            about = f"in an evaluation, with inputs {describe(batch.inputs)}"
            blame(f"The recipe's model failed {about}", error, self.recipe.model)
        self._totals.add(outputs, batch)

    def _dtype_of_weights(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    def on_validation_epoch_end(self) -> None:
        """Log the means over all samples of all ranks."""
        self._drawn.close()
        self.means = self.measured_means()
        prefix = "test" if self.trainer.testing else "val"
        logged = {f"{prefix}_{name}": v for name, v in self.means.items() if name != "samples"}
        # The ranks have the same values; Lightning would advise to average them. max changes none.
        self.log_dict(logged, prog_bar=True, sync_dist=True, reduce_fx="max")

    def measured_means(self) -> dict[str, float]:
        """Return the means over all samples of all ranks, at an evaluation's end."""
        return self._totals.means()

    on_test_start = on_validation_start
    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end


def _compute_first(optimizer: torch.optim.Optimizer) -> None:
    """Let a step compute the gradients before anything else, as samestep's own loop does.

    Lightning hands them over as a closure, which an optimizer of one's own may not call.
    """
    update = optimizer.step

    def step(_: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        update()
        return loss

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
