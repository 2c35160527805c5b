"""Open a checkpoint of a run as a model: the one way from a run directory to weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samestep.ranks.world import Device, choose_device
from samestep.recipe import Recipe
from samestep.run import checkpoints
from samestep.run.directory import is_run, no_run
from samestep.run.index import Entry, find_checkpoint
from samestep.session.recipe_changes import check_recipe_unchanged
from samestep.session.request import draft, read_toml
from samestep.settings import Settings
from samestep.training.alike import seed_alike
from samestep.training.device import check_precision, data_dtype
from samestep.training.prepare import hold_parameters, to_channels_last
from samestep.training.snapshot import check_recipe, load_evaluated


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A checkpoint as a model, and what the run says of it."""

    model: nn.Module
    """In eval mode, on the device, in the precision of the run."""
    recipe: Recipe
    options: Any
    settings: Settings
    entry: Entry
    content: dict[str, Any]
    """All that the checkpoint holds."""
    device: torch.device
    dtype: torch.dtype


def open_checkpoint(
    path: Path, name: str = "best", *, device: Device = "auto", recipe: Recipe | None = None
) -> Opened:
    """Return a checkpoint of a run as a model.

    Args:
        path: the run's directory.
        name: "best", "last", or a file name in its checkpoints/.
        device: where to compute.
        recipe: instead of the one that the run names.

    Raises:
        UserError: there is no such run or checkpoint, it does not fit the recipe, or the file of
            the recipe has changed since.
    """
    if not is_run(path):
        raise no_run(path)
    if recipe is None:
        check_recipe_unchanged(path, str(read_toml(path / "settings.toml").get("recipe")))
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
    model = recipe.build_model(options).to(device=target, dtype=dtype).eval()
    hold_parameters(model, settings)
    load_evaluated(model, content)
    if settings.channels_last:
        to_channels_last(model)
    return Opened(
        model=model,
        recipe=recipe,
        options=options,
        settings=settings,
        entry=entry,
        content=content,
        device=target,
        dtype=dtype,
    )
