"""Evaluate a checkpoint of a run from its directory alone."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from samestep.data.batches import open_source
from samestep.data.recipe_splits import load_splits
from samestep.errors import UserError
from samestep.execution.request import Request, draft
from samestep.machine import usable_cores
from samestep.ranks.world import Device, World, choose_device
from samestep.run import checkpoints
from samestep.run.directory import is_run
from samestep.run.index import Entry, read_index
from samestep.training.evaluation import evaluate
from samestep.training.loop import evaluation_batch
from samestep.training.precision import check_precision, data_dtype
from samestep.training.prepare import to_channels_last
from samestep.training.state import check_classes, check_recipe, load_model, seed_alike
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
    if not is_run(path):
        raise UserError(f"{path} holds no run: there is no settings.toml in it.")
    start = draft(str(path.resolve()))  # a run may be called like a recipe
    options = _with_data_dir(start.options(), data_dir, start.recipe.name)
    request = Request(
        recipe=start.recipe, source=start.source, options=options, settings=start.settings()
    )
    entry = find_checkpoint(path / "checkpoints", name)
    state = checkpoints.load(path / "checkpoints", entry)
    check_recipe(state, request.recipe.name)
    world = World(device=choose_device(device, 0))
    settings, recipe = request.settings, request.recipe
    check_precision(settings.precision, world.device)
    dtype = data_dtype(settings.precision)
    seed_alike(settings.seed)
    options = recipe.complete_options(options)
    splits = load_splits(recipe, options, world, wanted=(split,))
    check_classes(state, splits.classes)
    data = getattr(splits, split)
    if data is None:
        raise UserError(f"Recipe {recipe.name} has no {split} data.")
    seed_alike(settings.seed)
    model = recipe.build_model(options).to(device=world.device, dtype=dtype)
    load_model(model, state)
    if settings.channels_last:
        to_channels_last(model)
    torch.set_num_threads(choose_threads(settings.threads, model, len(usable_cores()), 1))
    source = open_source(
        data,
        world,
        seed=settings.seed,
        dtype=dtype,
        num_workers=settings.num_workers,
        transform=recipe.transform,
    )
    values = evaluate(
        model,
        source,
        recipe.loss,
        recipe.metrics,
        world=world,
        batch_size=evaluation_batch(settings.batch_size or 1),
        precision=settings.precision,
        classes=splits.classes,
    )
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


def find_checkpoint(folder: Path, name: str) -> Entry:
    """Return the entry of the best, the last, or a named checkpoint.

    Raises:
        UserError: the index has none of this name; those it has are listed.
    """
    index = read_index(folder)
    if name == "last" and index.last:
        return index.last
    if name == "best" and (index.best or index.last):
        best = index.best or index.last  # without a validation set the last is all there is
        assert best is not None
        return best
    for entry in index.checkpoints:
        if entry.path in (name, f"{name}.pt"):
            return entry
    known = ", ".join(entry.path for entry in index.checkpoints) or "none yet"
    raise UserError(f"{folder} has no checkpoint {name!r}. It has: best, last, {known}.")
