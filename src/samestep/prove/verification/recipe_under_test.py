"""A recipe with its few samples on one device, for experiments, with or without random behaviour.

Held still, batch normalisation and random draws give every sample the same result on any rank. A
difference that is left then has another cause.
"""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.amp import grad_scaler
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from samestep.base.settings import Precision, Settings, in_precision
from samestep.base.trees import check_rows, map_leaves, narrow, tree_leaves
from samestep.core.data.keyed_random import seed_alike
from samestep.core.data.order import Block
from samestep.core.data.recipe_data import open_split
from samestep.core.data.source import Source
from samestep.core.learner.apply import Moment, applied, call, evaluating, summed, timed
from samestep.core.learner.batch_transform import BatchTransform
from samestep.core.learner.device import autocast, data_dtype
from samestep.core.learner.optimizer import optimizer_of
from samestep.core.learner.prepare import place_loss, prepare
from samestep.core.learner.side_effects import (
    ALL_KINDS,
    Draws,
    Kind,
    RandomDraws,
    batch_norms,
    dropouts,
    outside,
    watched,
)
from samestep.core.recipe import Recipe, Splits
from samestep.launch.ranks.mesh import free_gathered
from samestep.launch.ranks.world import World
from samestep.prove.verification.few_samples import TrainingSize
from samestep.prove.verification.trace import ROUNDING, hash_of, sample_hashes

_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)


class FreeStep(NamedTuple):
    """A forward and backward with nothing fixed."""

    model: nn.Module  # with its gradients
    seen: RandomDraws
    own_generators: list[str]
    """Lines that draw from a `torch.Generator` of their own, with state kept across steps."""

    @property
    def kinds(self) -> frozenset[Kind]:
        """What the recipe has of the things that differ by themselves on other numbers of ranks."""
        present: dict[Kind, Any] = {
            "batchnorm": batch_norms(self.model),
            "dropout": self.seen.draws,
            "state": self.seen.generators,
        }
        return frozenset(kind for kind, places in present.items() if places)


class HeldForward(NamedTuple):
    """A forward with all draws fixed."""

    model: nn.Module
    block: Block
    outputs: Any  # detached; (samples, …)


@dataclass(frozen=True, kw_only=True)
class RecipeUnderTest:
    """A recipe with its few samples, on one device."""

    recipe: Recipe
    options: Any
    settings: Settings
    splits: Splits
    size: TrainingSize
    world: World  # of only this process

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights and data."""
        return data_dtype(self.settings.precision)

    @property
    def rounding(self) -> float:
        """The largest relative difference that rounding explains."""
        if self.settings.virtual_ranks is not None:
            return 0.0
        # One forward on a CPU rounds less than the steps of a training, or a GPU's convolutions.
        single = self.settings.precision == "fp32" and self.world.device.type == "cpu"
        return 1e-4 if single else ROUNDING[self.settings.precision]

    @cached_property
    def placed_loss(self) -> Callable[[Any, Any], Tensor]:
        """The loss, with its own tensors on the device and in the type of the weights."""
        placed = place_loss(self.recipe.loss, self.world.device, self.dtype)
        placed = timed(placed, Moment())  # a training gives its own
        return self.exactly(summed(placed, self.recipe.loss_weights))

    @cached_property
    def placed_evaluation_loss(self) -> Callable[[Any, Any], Tensor]:
        """The loss of evaluations in the same way."""
        placed = place_loss(self.recipe.evaluated_loss, self.world.device, self.dtype)
        return self.exactly(evaluating(self.recipe, placed))

    def exactly(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that computes in float64 throughout, where that is compared."""
        held = self.settings.virtual_ranks is None and self.settings.precision == "fp64"
        return _in_doubles(function) if held else function

    def applied(self, model: nn.Module) -> nn.Module:
        """Return the module that takes the recipe's inputs: the model, or its call by `forward`."""
        own = self.recipe.forward
        return applied(model, replace(self.recipe, forward=own and self.exactly(own)))

    @cached_property
    def free_step(self) -> FreeStep:
        """One step with nothing fixed, watched."""
        draws, block, model = RandomDraws(), self.batch(), self.build()
        hold_model(model, draws, frozenset())
        loss = watched(self.placed_loss, draws)
        self.free_loss(model, block, loss).backward()  # type: ignore[no-untyped-call]
        before = dict(draws.own)
        if before:  # a generator that is made or seeded anew in each forward keeps no state
            draws.own.clear()
            self.free_loss(model, block, loss)
        own = [line for line in before if before[line] != draws.own.get(line)]
        return FreeStep(model, draws, own)

    def steps_of_optimizer(self) -> Iterator[torch.optim.Optimizer]:
        """Yield the recipe's own optimizer, each time with the gradients for another step."""
        model, block, settings = self.build(), self.batch(), self.settings
        optimizer = optimizer_of(self.recipe, model, settings, settings.lr, self.world.device)
        for _ in range(2):
            model.zero_grad()
            self.free_loss(model, block, self.placed_loss).backward()  # type: ignore[no-untyped-call]
            yield optimizer

    @cached_property
    def held_outputs(self) -> HeldForward | None:
        """A forward with all draws fixed; None if outputs are not one per sample.

        Some may be one number for the whole batch, such as a learned temperature.
        """
        block, model = self.batch(), self.held_model()
        outputs = self.forward(model, block.inputs)
        leaves = tree_leaves(outputs)
        fits = [isinstance(x, Tensor) and (x.dim() == 0 or len(x) == block.rows) for x in leaves]
        if not all(fits) or all(leaf.dim() == 0 for leaf in leaves):
            return None
        return HeldForward(model, block, map_leaves(Tensor.detach, outputs))

    @property
    def unmixed(self) -> "RecipeUnderTest":
        """The recipe as evaluations and metrics have its samples: without `batch_transform`."""
        if self.recipe.batch_transform is None:
            return self
        return replace(self, recipe=replace(self.recipe, batch_transform=None))

    @property
    def held_forward(self) -> HeldForward | None:
        """The same where all outputs are one per sample, else None."""
        held = self.held_outputs
        whole = held is None or any(leaf.dim() == 0 for leaf in tree_leaves(held.outputs))
        return None if whole else held

    def build(self) -> nn.Module:
        """Return the model as a run builds it, in training mode."""
        seed_alike(self.settings.seed)
        plain = replace(self.settings, sync_batchnorm=False, compile="off")
        model = prepare(self.recipe.build_model(self.options), plain, self.world, self.dtype)
        model.forward = self.exactly(model.forward)
        return model.train()

    def held_model(self) -> nn.Module:
        """Return the model with all that it draws fixed."""
        model = self.build()
        hold_model(model, RandomDraws(), ALL_KINDS, partial(self.calibrate, self.applied(model)))
        return model

    def calibrate(self, takes: nn.Module) -> None:
        """Call what takes the inputs with a few samples, whose statistics BatchNorm is held at.

        It is called as in a training: only that gathers the weights of a sharded model.
        """
        block = self.batch()
        with autocast(self.settings.precision, self.world.device):
            call(takes, self.part(block, 0, min(4, block.rows)).inputs)
        free_gathered(takes)

    def batch(
        self,
        step: int = 0,
        recipe: Recipe | None = None,
        seed: int = 0,
        world: World | None = None,
        rows: range | None = None,
    ) -> Block:
        """Read a step of the first epoch, counted from 0, or a world's part of it.

        Another recipe may read the same data; the global generators begin with the seed. If a
        recipe collates, only these `rows` are put together.
        """
        size = self.size
        cut = None if rows is None else lambda _rows, _size: [(rows.start, len(rows), len(rows))]
        with self.source(self.splits.train, recipe, world) as source:
            seed_alike(seed)
            blocks = source.blocks(
                0, step, global_batch=size.global_batch, drop_last=size.drop_last, cut=cut
            )
            block = next(single for steps in blocks for single in steps.singles())
        block = block.parts[0] if block.parts else block
        if self.recipe.batch_transform is None or recipe or world or rows:
            return block  # as it is read
        return BatchTransform(self.recipe, self.settings, self.world)(block, 0, step)

    def part(self, block: Block, start: int, count: int) -> Block:
        """Return some rows of a block that `batch` returned."""
        if self.recipe.collate is not None and self.recipe.batch_transform is None:
            return self.batch(block.first_step, rows=range(start, start + count))
        check_rows((block.inputs, block.targets), block.rows)
        inputs, targets = (narrow(tree, start, count) for tree in (block.inputs, block.targets))
        return replace(block, inputs=inputs, targets=targets, rows=count)

    def hashes(
        self, recipe: Recipe | None = None, seed: int = 0, world: World | None = None
    ) -> list[str]:
        """Return a hash of each sample of the first step, as `batch` reads it."""
        block = self.batch(0, recipe or self.recipe, seed, world)
        if self.recipe.collate is None:
            return sample_hashes(block.inputs, block.targets)
        rows = [self.batch(0, recipe, seed, world, range(k, k + 1)) for k in range(block.rows)]
        return [hash_of(row.inputs, row.targets) for row in rows]

    def source(
        self, data: Any, recipe: Recipe | None = None, world: World | None = None
    ) -> closing[Source]:
        """Return the source of a split, read in this process; the caller closes it."""
        settings, recipe = replace(self.settings, num_workers=0), recipe or self.recipe
        return closing(open_split(data, world or self.world, recipe, settings, self.dtype))

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        """Return the model's outputs in the precision of the settings."""
        with autocast(self.settings.precision, self.world.device):
            return call(self.applied(model), inputs)

    def loss(
        self,
        outputs: Any,
        targets: Any,
        moment: Moment | None = None,
        loss: Callable[..., Tensor] | None = None,
    ) -> Tensor:
        """Return the loss, that of the training if not given, with all that it draws fixed."""
        timely = timed(loss or self.placed_loss, moment or Moment())
        held = watched(timely, RandomDraws(), ALL_KINDS)
        with autocast(self.settings.precision, self.world.device):
            return cast("Tensor", held(outputs, targets))

    def free_loss(self, model: nn.Module, block: Block, loss: Callable[..., Any]) -> Tensor:
        """Return the loss of a batch with nothing fixed."""
        with autocast(self.settings.precision, self.world.device):
            outputs = call(self.applied(model), block.inputs)
            return cast("Tensor", loss(outputs, block.targets))


def draws_in_words(draws: RandomDraws) -> list[str]:
    """Return the generators drawn from: torch, with the user's lines, Python or NumPy."""
    torch_lines = {f"torch ({line})" if line else "torch" for line in draws.draws.values()}
    return sorted(torch_lines | draws.generators)


def first_line(error: Exception) -> str:
    """Return an error's type and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:300]


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


def hold_model(
    model: nn.Module,
    draws: RandomDraws,
    held: frozenset[Kind],
    calibrate: Callable[[], Any] | None = None,
) -> None:
    """Change a built model in place: note what it draws, and hold some of it still.

    `calibrate` calls the model with some inputs, the same on every rank. BatchNorm is held at their
    statistics, or at those that the model was built with, which would normalise nothing.
    """
    if "dropout" in held:
        for module, fraction in dropouts(model):
            setattr(module, fraction, 0.0)
    norms = [*batch_norms(model).values()] if "batchnorm" in held else []
    if norms and calibrate is not None:
        was_training, momenta = model.training, [norm.momentum for norm in norms]
        model.train()
        for norm in norms:
            norm.momentum = 1.0
        with torch.no_grad(), outside(RandomDraws(), hold=True), Draws(RandomDraws(), hold=True):
            calibrate()
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        model.train(was_training)
    freeze(norms)
    model.forward = watched(model.forward, draws, held)


def freeze(norms: Iterable[_BatchNorm]) -> None:
    """Let batch normalisations use the statistics that they have, in training too."""
    for norm in norms:
        norm.eval()
        norm.train = lambda *_, norm=norm, **__: norm  # type: ignore[method-assign]
        if norm.running_mean is None:  # it uses the batch's statistics in an evaluation, too
            norm.forward = partial(_affine, norm)  # type: ignore[method-assign]


def _affine(norm: _BatchNorm, inputs: Tensor) -> Tensor:
    zeros = inputs.new_zeros(inputs.shape[1])
    return nn.functional.batch_norm(inputs, zeros, zeros + 1, norm.weight, norm.bias, eps=norm.eps)


def nudge(model: nn.Module, precision: Precision) -> None:
    """Move each weight up or down by one rounding of the arithmetic, always the same way."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        # Convolutions on GPUs round to 11 bits by default, as fp16 does.
        narrow = precision == "fp16" or parameter.device.type == "cuda"
        unit = 2.0**-8 if precision == "bf16" else 2.0**-11 if narrow else 2.0**-23
        signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
        with torch.no_grad():
            parameter.mul_(1 + unit * signs.to(parameter))


class Doubles(TorchFunctionMode):
    """Use float64 wherever code asks for a narrower floating-point type.

    A cast such as `outputs.float()` is common and harmless. In a comparison in float64 it would
    bring back the rounding of float32, or mix types that do not fit each other.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        def wide(value: Any) -> Any:
            narrow = isinstance(value, torch.dtype) and value in _NARROW
            return torch.float64 if narrow else value

        kwargs = dict(kwargs or {})
        if sys._getframe(1).f_code.co_filename == grad_scaler.__file__:  # noqa: SLF001
            return func(*args, **kwargs)  # its kernels take a scale in float32, whatever it scales
        if func in _CASTS:
            return args[0].double()
        if func is not Tensor.view:  # it reads bits as another type
            args, kwargs = tuple(map(wide, args)), {k: wide(v) for k, v in kwargs.items()}
        return func(*args, **kwargs)


def _in_doubles(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward or a loss that casts to no narrower type than float64."""

    @functools.wraps(function)  # keeps the names of its arguments
    def call(*args: Any, **kwargs: Any) -> Any:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)  # of constants that it makes
        try:
            with Doubles():
                return function(*args, **kwargs)
        finally:
            torch.set_default_dtype(before)

    return call
