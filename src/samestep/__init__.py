"""Train the same step on one process and on many.

    run = samestep.train("spiral", epochs=3, nproc=2)    # a name, a file, or a samestep.Recipe
    run.result["test"], run.history, run.per_epoch       # plain dicts, ready for pandas
    model = samestep.load(run, checkpoint="best")        # an nn.Module in eval mode
    samestep.evaluate(run, split="validation")
    samestep.export(run, "model.safetensors")            # the same weights for other programs
    samestep.predict(run, ["a.csv", "b.csv"])
    samestep.verify("spiral", world_sizes=(1, 2))["same"]
    samestep.check("train.py", nproc=2).findings         # any distributed script
    samestep.compare(run, "runs/ID")["same_training"]
    samestep.runs("runs", sort="metric")
    samestep.sweep("spiral", lr=[1e-3, 1e-2])            # a run for each combination
    job = samestep.submit("spiral", nodes=2)             # to Slurm; job.result() waits

    samestep.Recipe, Splits                              # a model and its data
    samestep.open_run, gather                            # for a training loop of your own
    samestep.dist                                        # only the process group

Names are imported when they are first used, so importing samestep is cheap.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from samestep.base.version import __version__

if TYPE_CHECKING:
    from samestep import dist
    from samestep.shell.api.checked_script import check
    from samestep.shell.api.jobs import SubmittedJob, submit
    from samestep.shell.api.run_lists import compare, runs
    from samestep.shell.api.sweeps import sweep
    from samestep.shell.api.trained_models import evaluate, export, load, predict
    from samestep.shell.api.trained_run import TrainedRun
    from samestep.shell.api.training import train
    from samestep.shell.api.verify_ranks import verify
    from samestep.scripts.checking.check_report import CheckReport
    from samestep.core.data.keyed_random import normal, uniform
    from samestep.base.errors import UserError
    from samestep.bridges.lightning import LitData, LitRecipe, TrackerLogger
    from samestep.core.recipe import Recipe, Splits
    from samestep.base.run.records import read_records
    from samestep.core.session.own_gather import gather
    from samestep.core.session.own_run import OwnRun, open_run
    from samestep.base.settings import Settings, may_change

__all__ = [
    "CheckReport",
    "LitData",
    "LitRecipe",
    "OwnRun",
    "Recipe",
    "Settings",
    "Splits",
    "SubmittedJob",
    "TrackerLogger",
    "TrainedRun",
    "UserError",
    "__version__",
    "check",
    "compare",
    "dist",
    "evaluate",
    "export",
    "gather",
    "load",
    "may_change",
    "normal",
    "open_run",
    "predict",
    "read_records",
    "runs",
    "submit",
    "sweep",
    "train",
    "uniform",
    "verify",
]

_HOMES = {
    name: home
    for home, names in {
        "api.checked_script": "check",
        "api.jobs": "SubmittedJob submit",
        "api.run_lists": "compare runs",
        "api.sweeps": "sweep",
        "api.trained_models": "evaluate export load predict",
        "api.trained_run": "TrainedRun",
        "api.training": "train",
        "api.verify_ranks": "verify",
        "checking.check_report": "CheckReport",
        "data.keyed_random": "normal uniform",
        "errors": "UserError",
        "lightning": "LitData LitRecipe TrackerLogger",
        "recipe": "Recipe Splits",
        "run.records": "read_records",
        "session.own_gather": "gather",
        "session.own_run": "OwnRun open_run",
        "settings": "Settings may_change",
    }.items()
    for name in names.split()
}
_UNLISTED = frozenset(
    {"CheckReport", "OwnRun", "SubmittedJob", "TrainedRun", "may_change", "read_records"}
)
"""Results' types and helpers: public, but not what `samestep.<TAB>` offers."""


def __getattr__(name: str) -> Any:
    if name == "dist":
        return importlib.import_module("samestep.dist")
    if name not in _HOMES:
        raise AttributeError(f"module 'samestep' has no attribute {name!r}")
    return getattr(importlib.import_module(f"samestep.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """Return the names for `help(samestep)` and completion; Lightning's if it is installed."""
    offered = [name for name in __all__ if name not in _UNLISTED]
    there = importlib.util.find_spec("lightning") is not None
    return [name for name in offered if there or _HOMES.get(name) != "lightning"]
