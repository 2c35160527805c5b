"""A checkpoint of a run as a model, read from the run's directory; and its evaluation."""

from collections.abc import Sized
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from samestep.base.errors import UserError, listed
from samestep.base.machine import usable_cores
from samestep.base.run import checkpoints
from samestep.base.run.directory import is_run, no_run
from samestep.base.run.index import Entry, find_checkpoint
from samestep.base.settings import Device, Settings
from samestep.core.data.keyed_random import seed_alike
from samestep.core.data.recipe_data import SPLITS, load_splits, open_split
from samestep.core.data.source import Source
from samestep.core.learner.apply import Moment, applied, evaluating, measure_of, terms_of
from samestep.core.learner.device import check_precision, choose_threads, data_dtype, switched
from samestep.core.learner.prepare import hold_parameters, place, place_loss, to_channels_last
from samestep.core.recipe import Recipe, Splits
from samestep.core.session.declared import read_config
from samestep.core.session.recipe_changes import check_recipe_unchanged
from samestep.core.session.request import draft
from samestep.core.training.dry_run import fitting_metrics
from samestep.core.training.evaluation import Totals, evaluate, evaluation_batch
from samestep.core.training.snapshot import check_classes, check_recipe, load_evaluated
from samestep.launch.ranks.world import World, choose_device

Split = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class TrainedModel:
    """A checkpoint as a model, and what the run says of it."""

    model: nn.Module
    """In eval mode, on the device, in the precision of the run."""
    recipe: Recipe
    options: Any
    settings: Settings
    entry: Entry
    content: dict[str, Any]
    """What the checkpoint holds, without its large tensors."""
    device: torch.device
    dtype: torch.dtype


class _OpenedData(NamedTuple):
    """A split of a run's data, and the model with the options of this data."""

    model: TrainedModel
    splits: Splits
    source: Source
    world: World
    """Of one process."""


def open_checkpoint(
    path: Path, name: str = "best", *, device: Device = "auto", recipe: Recipe | None = None
) -> TrainedModel:
    """Return a checkpoint of a run as a model: "best", "last", or a file name in checkpoints/.

    `recipe` takes the place of the one that the run names.
    """
    if not is_run(path):
        raise no_run(path)
    if recipe is None:
        check_recipe_unchanged(path, str(read_config(path / "settings.toml").get("recipe")))
    start = draft(str(path.resolve()), None, recipe)  # a run may be called like a recipe
    options, settings = start.options(), start.settings()
    recipe = start.recipe.with_options(options)
    entry = find_checkpoint(path / "checkpoints", name)
    content = checkpoints.load(path / "checkpoints", entry)
    check_recipe(content, recipe.name)
    target = choose_device(device, 0)
    check_precision(settings.precision, target)
    dtype = data_dtype(settings.precision)
    seed_alike(settings.seed)
    model = recipe.build_model(options).eval()
    place(model, target, dtype)
    hold_parameters(model, settings)
    load_evaluated(model, content)
    if settings.channels_last:
        to_channels_last(model)
    small = checkpoints.without_tensors(content)
    return TrainedModel(model, recipe, options, settings, entry, small, target, dtype)


def evaluate_run(
    path: Path,
    name: str = "best",
    *,
    split: Split = "test",
    device: Device = "auto",
    data_dir: str | None = None,
    skip_bad: int | None = None,
    given: Recipe | None = None,
) -> dict[str, Any]:
    """Return loss and metrics of a checkpoint over a split, in one process.

    Where the data names its classes, also `per_class` and `confusion` as result.json has them.
    `data_dir` and `skip_bad` are options of recipes that have them; `given` is a recipe instead of
    the one that the run names.
    """
    opened = open_checkpoint(path, name, device=device, recipe=given)
    opened, splits, source, world = open_data(opened, split, data_dir=data_dir, skip_bad=skip_bad)
    recipe, settings, model = opened.recipe, opened.settings, opened.model
    moment = Moment()
    moment.after(opened.content["position"])
    loss = place_loss(recipe.evaluated_loss, opened.device, opened.dtype)
    totals = partial(
        Totals,
        evaluating(recipe, loss, moment),
        fitting_metrics(recipe.metrics, source.peek(1).targets),
        world,
        terms=terms_of(recipe),
        reduction=recipe.reduction,
        measure=measure_of(recipe, model),
    )
    measured = partial(
        switched(settings, opened.device)(evaluate),
        applied(model, recipe, moment),
        batch_size=evaluation_batch(settings),
        precision=settings.precision,
        seed=settings.seed,
    )
    values = measured(source, totals(classes=recipe.counted_classes(splits)))
    for of, data in splits.by_name.items() if split == "validation" else ():
        of_it = measured(open_split(data, world, recipe, settings, opened.dtype), totals())
        values |= {f"{of}/{key}": of_it[key] for key in of_it if key != "samples"}
    about: dict[str, Any] = {"recipe": recipe.name, "split": split}
    about |= {"checkpoint": opened.entry.path, "step": opened.entry.step}
    return {**about, **values, **({"notes": list(splits.notes)} if splits.notes else {})}


def open_data(
    opened: TrainedModel,
    split: Split,
    *,
    data_dir: str | None,
    skip_bad: int | None,
    virtual_ranks: bool = True,
) -> _OpenedData:
    """Open a split of a run's data for its model, in one process.

    `data_dir` and `skip_bad` are options of recipes that have them. With `virtual_ranks`, the
    samples come in the order of the run's virtual ranks, else in that of the data.

    Raises:
        UserError: there is no such split, it is empty, or its classes are not the model's.
    """
    recipe, settings = opened.recipe, opened.settings
    elsewhere = _elsewhere(opened.options, recipe.name, data_dir=data_dir, skip_bad=skip_bad)
    options = recipe.complete_options(elsewhere)
    recipe = recipe.with_options(options)
    parts = settings.virtual_ranks or 0 if virtual_ranks else 0
    world = World(device=opened.device, virtual_ranks=parts)
    seed_alike(settings.seed)
    splits = load_splits(recipe, options, world, wanted=(split,))
    check_classes(opened.content, splits.classes)
    data = getattr(splits, split)
    if data is None:
        others = [f"--split {name}" for name in SPLITS if getattr(splits, name) is not None]
        raise UserError(
            f"Recipe {recipe.name} has no {split} data.",
            remedy=f"Choose {listed(others, between=' or ')}.",
        )
    if isinstance(data, Sized) and not len(data):
        place = f" in {data_dir}" if data_dir is not None else ""
        raise UserError(
            f"There are no {split} samples{place}. If the run was trained on all of it, name other "
            "data with --data-dir; if all of it is new, use --split test."
        )
    torch.set_num_threads(choose_threads(settings.threads, opened.model, len(usable_cores()), 1))
    source = open_split(data, world, recipe, settings, opened.dtype)
    return _OpenedData(replace(opened, recipe=recipe, options=options), splits, source, world)


def _elsewhere(options: Any, recipe: str, **changes: Any) -> Any:
    """Return the options for data in another place; what is read there is not made up."""
    named = {name: value for name, value in changes.items() if value is not None}
    names = {field.name for field in fields(options)} if options is not None else set()
    for name in named:
        if name not in names:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag}: recipe {recipe} has no such option.")
    if "data_dir" in named and "synthetic" in names:
        named["synthetic"] = False
    return replace(options, **named) if named else options
