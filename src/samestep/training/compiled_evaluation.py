"""Evaluations with a compiled forward, where a run evaluates enough for that."""

from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from samestep.data.trees import tree_leaves
from samestep.ranks.world import World
from samestep.settings import Settings
from samestep.training.apply import call
from samestep.training.compiled import explained
from samestep.training.evaluation import evaluation_batch
from samestep.training.plan import Plan
from samestep.training.work import Work

# An estimate, not a measurement: compiling takes some ten seconds, and a batch of a few
# milliseconds then takes perhaps a third less.
_LEAST_BATCHES = 10_000


class FullBatches:
    """A model compiled for batches of one size; the last one of an evaluation runs as it is."""

    def __init__(self, model: nn.Module, batch_size: int) -> None:
        self._model, self._batch_size = model, batch_size
        self._compiled = cast("nn.Module", torch.compile(model, dynamic=False))

    def __call__(self, inputs: Any) -> Any:
        """Return the model's outputs."""
        if len(tree_leaves(inputs)[0]) != self._batch_size:
            return call(self._model, inputs)
        with explained():
            return call(self._compiled, inputs, self._model)


def with_forward(work: Work) -> Work:
    """Return the work with a compiled forward for its evaluations, where that pays."""
    if work.validation is None or work.trainee.own:
        return work
    model, num_samples = work.trainee.model, work.validation.num_samples
    forward = compiled_forward(model, work.settings, work.world, work.plan, num_samples)
    return replace(work, forward=forward)


def compiled_forward(
    model: nn.Module, settings: Settings, world: World, plan: Plan, num_samples: int
) -> FullBatches | None:
    """Return what evaluations call in the model's place, or None where compiling does not pay.

    It is decided by the plan, not by the clock, so that a run repeats itself. On the CPU a forward
    gains little, and compiling takes the longest.

    Args:
        model: the unwrapped model.
        settings: of the run.
        world: this rank among the others.
        plan: how long the run is.
        num_samples: validation samples.
    """
    if settings.compile == "off" or world.device.type != "cuda":
        return None
    batch_size = evaluation_batch(settings, plan.micro_batch_size)
    every = settings.eval_every_epochs * plan.steps_per_epoch
    every = min(every, settings.eval_every_steps or every)
    batches = num_samples // world.num_parts // batch_size
    if plan.total_steps // every * batches < _LEAST_BATCHES:
        return None
    return FullBatches(model, batch_size)
