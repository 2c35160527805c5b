"""Train the same step on one process and on many.

The names below are imported when they are first used, so that importing samestep is cheap.
"""

import importlib
from typing import TYPE_CHECKING, Any

from samestep.version import __version__

if TYPE_CHECKING:
    from samestep.data.keyed_random import normal, uniform
    from samestep.data.random_split import split_indices
    from samestep.data.spiral import SpiralDataset
    from samestep.errors import UserError
    from samestep.lightning import (
        CIFAR10DataModule,
        LitData,
        LitRecipe,
        SpiralDataModule,
        TrackerLogger,
    )
    from samestep.own_loop.own_run import OwnRun, open_run
    from samestep.ranks.process_group import (
        barrier,
        cleanup,
        is_main_process,
        reduce_tensor,
        setup_distributed,
    )
    from samestep.recipe import Recipe, Splits
    from samestep.run.records import read_records
    from samestep.settings import Settings

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
    "UserError",
    "__version__",
    "barrier",
    "cleanup",
    "is_main_process",
    "normal",
    "open_run",
    "read_records",
    "reduce_tensor",
    "setup_distributed",
    "split_indices",
    "uniform",
]

_HOMES = {
    "CIFAR10DataModule": "lightning",
    "LitData": "lightning",
    "LitRecipe": "lightning",
    "OwnRun": "own_loop.own_run",
    "Recipe": "recipe",
    "Settings": "settings",
    "SpiralDataModule": "lightning",
    "SpiralDataset": "data.spiral",
    "Splits": "recipe",
    "TrackerLogger": "lightning",
    "UserError": "errors",
    "barrier": "ranks.process_group",
    "cleanup": "ranks.process_group",
    "is_main_process": "ranks.process_group",
    "normal": "data.keyed_random",
    "open_run": "own_loop.own_run",
    "read_records": "run.records",
    "reduce_tensor": "ranks.process_group",
    "setup_distributed": "ranks.process_group",
    "split_indices": "data.random_split",
    "uniform": "data.keyed_random",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'samestep' has no attribute {name!r}")
    return getattr(importlib.import_module(f"samestep.{_HOMES[name]}"), name)
