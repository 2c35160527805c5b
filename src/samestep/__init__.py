"""Train the same step on one process and on many.

    run = samestep.train("spiral", epochs=3, nproc=2)    # a name, a file, or a samestep.Recipe
    run.result["test"], run.history, run.epochs          # plain dicts, ready for pandas
    model = samestep.load(run, checkpoint="best")        # an nn.Module in eval mode
    samestep.evaluate(run, split="validation")
    samestep.predict(run, ["a.csv", "b.csv"])
    samestep.verify("spiral", world_sizes=(1, 2))["same"]
    samestep.compare(run, "runs/ID")["same_training"]
    samestep.runs("runs", sort="metric")

    samestep.Recipe, Splits                              # a model and its data
    samestep.open_run                                    # for a training loop of your own

The names are imported when they are first used, so that importing samestep is cheap.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from samestep.version import __version__

if TYPE_CHECKING:
    from samestep.api.checkpoints import evaluate, load, predict
    from samestep.api.checks import verify
    from samestep.api.runs import compare, runs
    from samestep.api.trained_run import TrainedRun
    from samestep.api.training import train
    from samestep.data.keyed_random import normal, uniform
    from samestep.data.order import split_indices
    from samestep.dist import barrier, cleanup, is_main_process, reduce_tensor, setup_distributed
    from samestep.errors import UserError
    from samestep.lightning import (
        CIFAR10DataModule,
        LitData,
        LitRecipe,
        SpiralDataModule,
        TrackerLogger,
    )
    from samestep.recipe import Recipe, Splits
    from samestep.recipes.spiral import SpiralDataset
    from samestep.run.records import read_records
    from samestep.session.own_run import OwnRun, open_run
    from samestep.settings import Settings, may_change

__all__ = [
    "CIFAR10DataModule",
    "LitData",
    "LitRecipe",
    "OwnRun",
    "Recipe",
    "Settings",
    "SpiralDataModule",
    "SpiralDataset",
    "Splits",
    "TrackerLogger",
    "TrainedRun",
    "UserError",
    "__version__",
    "barrier",
    "cleanup",
    "compare",
    "evaluate",
    "is_main_process",
    "load",
    "may_change",
    "normal",
    "open_run",
    "predict",
    "read_records",
    "reduce_tensor",
    "runs",
    "setup_distributed",
    "split_indices",
    "train",
    "uniform",
    "verify",
]

_HOMES = {
    "CIFAR10DataModule": "lightning",
    "LitData": "lightning",
    "LitRecipe": "lightning",
    "OwnRun": "session.own_run",
    "Recipe": "recipe",
    "Settings": "settings",
    "SpiralDataModule": "lightning",
    "SpiralDataset": "recipes.spiral",
    "Splits": "recipe",
    "TrackerLogger": "lightning",
    "TrainedRun": "api.trained_run",
    "UserError": "errors",
    "barrier": "dist",
    "cleanup": "dist",
    "compare": "api.runs",
    "evaluate": "api.checkpoints",
    "is_main_process": "dist",
    "load": "api.checkpoints",
    "may_change": "settings",
    "normal": "data.keyed_random",
    "open_run": "session.own_run",
    "predict": "api.checkpoints",
    "read_records": "run.records",
    "reduce_tensor": "dist",
    "runs": "api.runs",
    "setup_distributed": "dist",
    "split_indices": "data.order",
    "train": "api.training",
    "uniform": "data.keyed_random",
    "verify": "api.checks",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'samestep' has no attribute {name!r}")
    return getattr(importlib.import_module(f"samestep.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """Return the names, for `help(samestep)` and completion; Lightning's where it is installed."""
    there = importlib.util.find_spec("lightning") is not None
    return [name for name in __all__ if there or _HOMES.get(name) != "lightning"]
