"""A recipe with its few samples, on one device: what the experiments ask."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from samestep.data.batches import open_split
from samestep.data.blocks import Block, Cut
from samestep.data.source import Source
from samestep.data.trees import map_leaves, narrow, tree_leaves
from samestep.ranks.world import World
from samestep.recipe import Recipe, Splits
from samestep.settings import Precision, Settings, in_precision
from samestep.training.alike import seed_alike
from samestep.training.apply import applied, call
from samestep.training.device import autocast, data_dtype
from samestep.training.prepare import place_loss, prepare
from samestep.training.side_effects import ALL_KINDS, Kind, RandomDraws, batch_norms, watched
from samestep.verification.difference import ROUNDING
from samestep.verification.doubles import in_doubles
from samestep.verification.fingerprints import batch_mark, sample_marks
from samestep.verification.randomness import hold_model
from samestep.verification.training_size import TrainingSize


class FreeStep(NamedTuple):
    """A forward and backward with nothing held still."""

    model: nn.Module
    """With its gradients."""
    seen: RandomDraws
    own_generators: list[str]
    """Lines that draw from a `torch.Generator` of their own, which goes on from step to step."""

    @property
    def kinds(self) -> frozenset[Kind]:
        """What the recipe has of those things that differ on other numbers of ranks."""
        present: dict[Kind, Any] = {
            "batchnorm": batch_norms(self.model),
            "dropout": self.seen.draws,
            "state": self.seen.generators,
        }
        return frozenset(kind for kind, found in present.items() if found)


class HeldForward(NamedTuple):
    """A forward with all draws held still."""

    model: nn.Module
    block: Block
    outputs: Any
    """Detached; (samples, …)."""


@dataclass(frozen=True, kw_only=True)
class RecipeUnderTest:
    """A recipe with its few samples, on one device."""

    recipe: Recipe
    options: Any
    settings: Settings
    splits: Splits
    size: TrainingSize
    world: World
    """This process alone, whatever others there are."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights and data."""
        return data_dtype(self.settings.precision)

    @property
    def rounding(self) -> float:
        """Relative difference that is no more than rounding."""
        if self.settings.virtual_ranks is not None:
            return 0.0
        # One forward on a CPU rounds less than the steps of a training, or a GPU's convolutions.
        single = self.settings.precision == "fp32" and self.world.device.type == "cpu"
        return 1e-4 if single else ROUNDING[self.settings.precision]

    @cached_property
    def placed_loss(self) -> Callable[[Any, Any], Tensor]:
        """The loss, with what it holds in the type of the weights."""
        return self.exactly(place_loss(self.recipe.loss, self.world.device, self.dtype))

    def exactly(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that computes in float64 throughout, where that is compared."""
        held = self.settings.virtual_ranks is None and self.settings.precision == "fp64"
        return in_doubles(function) if held else function

    def applied(self, model: nn.Module) -> nn.Module:
        """Return what takes the recipe's inputs: the model, or the model by its `forward`."""
        own = self.recipe.forward
        exact = None if own is None else self.exactly(own)
        return applied(model, replace(self.recipe, forward=exact))

    @cached_property
    def free_step(self) -> FreeStep:
        """One step with nothing held still, watched."""
        seen, block, model = RandomDraws(), self.batch(), self.build()
        hold_model(model, seen, frozenset())
        loss = watched(self.placed_loss, seen)
        self.free_loss(model, block, loss).backward()  # type: ignore[no-untyped-call]
        stood = dict(seen.own)
        if stood:  # one that is made or seeded anew in each forward has no state to be saved
            seen.own.clear()
            self.free_loss(model, block, loss)
        return FreeStep(model, seen, [line for line in stood if stood[line] != seen.own.get(line)])

    @cached_property
    def held_forward(self) -> HeldForward | None:
        """A forward with all draws held still; None where outputs are not one per sample."""
        block = self.batch()
        model = held_model(self, block)
        outputs = self.forward(model, block.inputs)
        for leaf in tree_leaves(outputs):
            if not (isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == block.rows):
                return None
        return HeldForward(model, block, map_leaves(Tensor.detach, outputs))

    def build(self) -> nn.Module:
        """Return the model as a run builds it, in training mode."""
        seed_alike(self.settings.seed)
        plain = replace(self.settings, sync_batchnorm=False, compile="off")
        model = prepare(self.recipe.build_model(self.options), plain, self.world, self.dtype)
        model.forward = self.exactly(model.forward)
        return model.train()

    def batch(
        self,
        step: int = 0,
        recipe: Recipe | None = None,
        seed: int = 0,
        world: World | None = None,
        rows: range | None = None,
    ) -> Block:
        """Return a step of the first epoch, counted from 0, or a world's part of it, read anew.

        Another recipe may read the same data; the seed is that of the global generators meanwhile.
        Of a recipe that collates, `rows` are put together alone.
        """
        size, cut = self.size, None if rows is None else _only(rows)
        with self.source(self.splits.train, recipe, world) as source:
            seed_alike(seed)
            blocks = source.blocks(
                0, step, global_batch=size.global_batch, drop_last=size.drop_last, cut=cut
            )
            found = next(single for block in blocks for single in block.singles())
            return found.parts[0] if found.parts else found

    def part(self, block: Block, start: int, count: int) -> Block:
        """Return some rows of a block that `batch` returned."""
        if self.recipe.collate is not None:
            return self.batch(block.first_step, rows=range(start, start + count))
        inputs, targets = (narrow(tree, start, count) for tree in (block.inputs, block.targets))
        return replace(block, inputs=inputs, targets=targets, rows=count)

    def marks(
        self, recipe: Recipe | None = None, seed: int = 0, world: World | None = None
    ) -> list[str]:
        """Return a mark for each sample of the first step, as `batch` reads it."""
        block = self.batch(0, recipe, seed, world)
        if self.recipe.collate is None:
            return sample_marks(block.inputs, block.targets)
        single = [self.batch(0, recipe, seed, world, range(k, k + 1)) for k in range(block.rows)]
        return [batch_mark(one.inputs, one.targets) for one in single]

    def source(
        self, data: Any, recipe: Recipe | None = None, world: World | None = None
    ) -> closing[Source]:
        """Return what reads a split in this process; it is to be closed."""
        recipe = recipe or self.recipe
        settings = replace(self.settings, num_workers=0)
        source = open_split(data, world or self.world, recipe, settings, self.dtype)
        return closing(source)

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        """Return the model's outputs in the precision of the settings."""
        with autocast(self.settings.precision, self.world.device):
            return call(self.applied(model), inputs)

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        """Return the loss with all that it draws held still."""
        with autocast(self.settings.precision, self.world.device):
            return cast(
                "Tensor", watched(self.placed_loss, RandomDraws(), ALL_KINDS)(outputs, targets)
            )

    def free_loss(self, model: nn.Module, block: Block, loss: Callable[..., Any]) -> Tensor:
        """Return the loss of a batch with nothing held still."""
        with autocast(self.settings.precision, self.world.device):
            outputs = call(self.applied(model), block.inputs)
            return cast("Tensor", loss(outputs, block.targets))


def held_model(tested: RecipeUnderTest, block: Block) -> nn.Module:
    """Return the model with all that it draws held still."""
    model = tested.build()
    hold_model(
        model, RandomDraws(), ALL_KINDS, lambda: tested.forward(model, few_inputs(tested, block))
    )
    return model


def few_inputs(tested: RecipeUnderTest, block: Block) -> Any:
    """Return some inputs for the statistics at which batch normalisation is held."""
    return tested.part(block, 0, min(4, block.rows)).inputs


def _only(rows: range) -> Cut:
    return lambda _rows, _size: [(rows.start, len(rows), len(rows))]


def first_line(error: Exception) -> str:
    """Return an error's type and the first line of its message."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300]


def exact_precision(tested: RecipeUnderTest, chosen: Precision) -> tuple[Precision, str, str]:
    """Return the precision to compare in, why it is not float64, and why no other works either."""

    def problem_in(precision: Precision) -> str:
        other = replace(tested, settings=in_precision(tested.settings, precision))
        try:
            loss = other.free_loss(other.build(), other.batch(), other.placed_loss)
            loss.backward()  # type: ignore[no-untyped-call]
        except Exception as error:
            return first_line(error)
        return ""

    if tested.settings.virtual_ranks is not None:  # bits are compared, in whatever precision
        return chosen, "", problem_in(chosen)
    mps = tested.world.device.type == "mps"
    no_float64 = "Apple GPUs have no float64" if mps else problem_in("fp64")
    if not no_float64:
        return "fp64", "", ""
    return chosen, no_float64, no_float64 if chosen == "fp64" else problem_in(chosen)
