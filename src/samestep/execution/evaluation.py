"""Evaluate a checkpoint of a run from its directory alone."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from samestep.data.batches import open_split
from samestep.data.recipe_splits import load_splits
from samestep.errors import UserError
from samestep.execution.opening import open_checkpoint
from samestep.machine import usable_cores
from samestep.ranks.world import Device, World
from samestep.training.apply import applied, terms_of
from samestep.training.backends import switched
from samestep.training.dry_run import fitting_metrics
from samestep.training.evaluation import evaluate, evaluation_batch
from samestep.training.prepare import place_loss
from samestep.training.snapshot import check_classes, seed_alike
from samestep.training.threads import choose_threads


def evaluate_run(
    path: Path,
    name: str = "best",
    *,
    split: Literal["train", "validation", "test"] = "test",
    device: Device = "auto",
    data_dir: str | None = None,
) -> dict[str, Any]:
    """Return loss and metrics of a checkpoint over a split, in one process.

    Where the data names its classes, also `per_class` and `confusion` as result.json has them.

    Args:
        path: the run's directory.
        name: "best", "last", or a file name in its checkpoints/.
        split: the part of the data.
        device: where to evaluate.
        data_dir: where the data is, for a recipe that has this option.

    Raises:
        UserError: there is no such run, checkpoint or split, or the checkpoint does not fit.
    """
    opened = open_checkpoint(path, name, device=device)
    recipe, settings, model = opened.recipe, opened.settings, opened.model
    options = recipe.complete_options(_with_data_dir(opened.options, data_dir, recipe.name))
    world = World(device=opened.device)
    seed_alike(settings.seed)
    splits = load_splits(recipe, options, world, wanted=(split,))
    check_classes(opened.content, splits.classes)
    data = getattr(splits, split)
    if data is None:
        raise UserError(f"Recipe {recipe.name} has no {split} data.")
    torch.set_num_threads(choose_threads(settings.threads, model, len(usable_cores()), 1))
    plain = replace(recipe, augment=None)
    source = open_split(data, world, plain, settings, opened.dtype)
    values = switched(settings, opened.device)(evaluate)(
        applied(model, recipe),
        source,
        place_loss(recipe.loss, opened.device, opened.dtype),
        fitting_metrics(recipe.metrics, source.peek(1).targets),
        world=world,
        batch_size=evaluation_batch(settings, settings.batch_size or 1),
        precision=settings.precision,
        seed=settings.seed,
        classes=recipe.counted_classes(splits),
        terms=terms_of(recipe),
    )
    entry = opened.entry
    return {
        "recipe": recipe.name,
        "split": split,
        "checkpoint": entry.path,
        "step": entry.step,
        **values,
    }


def _with_data_dir(options: Any, data_dir: str | None, recipe: str) -> Any:
    if data_dir is None:
        return options
    if options is None or "data_dir" not in {field.name for field in fields(options)}:
        raise UserError(f"--data-dir: recipe {recipe} reads no folder.")
    return replace(options, data_dir=data_dir)
