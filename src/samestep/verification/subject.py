"""A recipe with its few samples, on one device: what experiments ask."""

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from samestep.data.batches import open_source
from samestep.data.blocks import Block
from samestep.data.trees import narrow
from samestep.ranks.world import World
from samestep.recipe import Recipe, Splits
from samestep.settings import Settings
from samestep.training.precision import autocast, data_dtype
from samestep.training.prepare import prepare
from samestep.training.snapshot import seed_alike
from samestep.verification.difference import ROUNDING
from samestep.verification.randomness import ALL_KINDS, Seen, hold_model, watched
from samestep.verification.sizes import Cut


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A recipe with its few samples, on one device."""

    recipe: Recipe
    options: Any
    settings: Settings
    splits: Splits
    cut: Cut
    world: World
    """This process alone, whatever others there are."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights and data."""
        return data_dtype(self.settings.precision)

    def build(self) -> nn.Module:
        """Return the model as a run builds it, in training mode."""
        seed_alike(self.settings.seed)
        plain = replace(self.settings, sync_batchnorm=False, compile="off")
        model = prepare(self.recipe.build_model(self.options), plain, self.world, self.dtype)
        return model.train()

    def batch(
        self,
        step: int = 0,
        *,
        recipe: Recipe | None = None,
        seed: int = 0,
        world: World | None = None,
    ) -> Block:
        """Return a step of the first epoch, read anew.

        Args:
            step: of the epoch, counted from 0.
            recipe: another one that reads the same data.
            seed: of the global generators while it is read.
            world: whose part of the step.
        """
        recipe = recipe or self.recipe
        source = open_source(
            self.splits.train,
            world or self.world,
            seed=self.settings.seed,
            dtype=self.dtype,
            num_workers=0,
            transform=recipe.transform,
            augment=recipe.augment,
        )
        seed_alike(seed)
        try:
            blocks = source.blocks(
                0, step, global_batch=self.cut.global_batch, drop_last=self.cut.drop_last
            )
            return next(single for block in blocks for single in block.singles())
        finally:
            source.close()

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        """Return the model's outputs in the precision of the settings."""
        with autocast(self.settings.precision, self.world.device):
            return model(inputs)

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        """Return the loss with all that it draws held still."""
        with autocast(self.settings.precision, self.world.device):
            return cast("Tensor", watched(self.recipe.loss, Seen(), ALL_KINDS)(outputs, targets))

    @property
    def rounding(self) -> float:
        """Relative difference that is no more than rounding."""
        return ROUNDING[self.settings.precision]


def held_model(subject: Subject, block: Block) -> nn.Module:
    """Return the model with all that it draws held still."""
    model = subject.build()
    hold_model(model, Seen(), ALL_KINDS, lambda: few_inputs(block))
    return model


def few_inputs(block: Block) -> Any:
    """Return some inputs for the statistics at which batch normalisation is held."""
    return narrow(block.inputs, 0, min(4, block.rows))
