"""Train the same step on one process and on many.

    run = samestep.train("spiral", epochs=3, nproc=2)    # a name, a file, or a samestep.Recipe
    run.result["test"], run.history, run.per_epoch       # plain dicts, ready for pandas
    model = samestep.load(run, checkpoint="best")        # an nn.Module in eval mode
    samestep.evaluate(run, split="validation")
    samestep.export(run, "model.safetensors")            # the same weights for other programs
    samestep.predict(run, ["a.csv", "b.csv"])
    samestep.verify("spiral", nproc=(1, 2))["same"]
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
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from samestep import dist
    from samestep.base.errors import UserError
    from samestep.base.plugins import __version__
    from samestep.base.run.records import read_records
    from samestep.base.settings import Settings, may_change
    from samestep.bridges.lightning import LitData, LitRecipe, TrackerLogger
    from samestep.core.data.keyed_random import normal, uniform
    from samestep.core.loops.gather import gather
    from samestep.core.loops.run import OwnRun
    from samestep.core.recipe import Recipe, Splits
    from samestep.scripts.checking.check_report import CheckReport
    from samestep.shell.api.jobs import SubmittedJob, submit
    from samestep.shell.api.on_ranks import check, train, verify
    from samestep.shell.api.open_run import open_run
    from samestep.shell.api.run_functions import compare, evaluate, export, load, predict, runs
    from samestep.shell.api.sweeps import sweep
    from samestep.shell.api.trained_run import TrainedRun

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
        "shell.api.jobs": "SubmittedJob submit",
        "shell.api.on_ranks": "check train verify",
        "shell.api.sweeps": "sweep",
        "shell.api.run_functions": "compare evaluate export load predict runs",
        "shell.api.trained_run": "TrainedRun",
        "scripts.checking.check_report": "CheckReport",
        "core.data.keyed_random": "normal uniform",
        "base.errors": "UserError",
        "base.plugins": "__version__",
        "bridges.lightning": "LitData LitRecipe TrackerLogger",
        "core.recipe": "Recipe Splits",
        "base.run.records": "read_records",
        "core.loops.gather": "gather",
        "core.loops.run": "OwnRun",
        "shell.api.open_run": "open_run",
        "base.settings": "Settings may_change",
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
    return [name for name in offered if there or _HOMES.get(name) != "bridges.lightning"]


_PART_OF = {
    room: part
    for part, rooms in {
        "base": "errors machine run settings",
        "launch": "ranks stall",
        "core": "data learner recipe recipes session training",
        "show": "reporting tracking",
        "bridges": "huggingface lightning",
    }.items()
    for room in rooms.split()
}
"""Room → its part, of those that recipes, trackers and loops of users import."""


class _ShortNames(MetaPathFinder, Loader):
    """Find a room without its part: `samestep.data.augment` is `samestep.core.data.augment`."""

    def find_spec(self, fullname: str, *_where: object) -> ModuleSpec | None:
        package, _, rest = fullname.partition(".")
        part = _PART_OF.get(rest.partition(".")[0]) if package == "samestep" else None
        real = f"samestep.{part}.{rest}"
        if part is None or importlib.util.find_spec(real) is None:
            return None
        return ModuleSpec(fullname, self, loader_state=real)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(spec.loader_state)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state  # the import system has put in the other


sys.meta_path.insert(0, _ShortNames())  # ahead of the one that would load a file twice
