"""`samestep.sweep`: a recipe with many settings from Python, a run each."""

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from samestep.base.errors import UserError
from samestep.cluster.sweeping.chosen_by_optuna import OptunaChoice
from samestep.cluster.sweeping.side_by_side import EndedTraining, num_at_once, run_here
from samestep.cluster.sweeping.sweep_plan import MOST, SweepPlan, default_folder, num_points
from samestep.core.recipe import Recipe
from samestep.launch.ranks.process import TASK
from samestep.shell.api.arguments import AnyPath, one_line_errors, path_of
from samestep.shell.api.call import Call, call_of, check_may_start, request_of
from samestep.shell.api.sending import send
from samestep.shell.api.sweep_checks import check_trainings
from samestep.shell.api.trained_run import TrainedRun


@one_line_errors
def sweep(
    what: AnyPath | Recipe,
    *,
    folder: AnyPath | None = None,
    at_once: int | None = None,
    sample: int | None = None,
    optuna: bool = False,
    quiet: bool = False,
    **settings: Any,
) -> list[TrainedRun]:
    """Train a recipe once for each combination of the values; return the runs, in that order.

        runs = samestep.sweep("spiral", lr=[1e-3, 1e-2], hidden_dims=[(64, 32), (128, 64)])
        samestep.runs("runs/mine", sort="metric")

    Each training is a process of its own. Called again with the same arguments, it continues where
    it was: what has completed is not trained again. Ctrl-C stops all trainings, saved.

    Args:
        what: a recipe's name, its file, or a `samestep.Recipe`, which may be made in a notebook.
        folder: the sweep's folder; by default one in runs/ that the arguments decide.
        at_once: trainings at once; by default one per GPU, else one per core.
        sample: train this many of the combinations, drawn at random by `seed`.
        optuna: let Optuna choose the sample, by how the trainings before ended.
        quiet: whether to show nothing.
        settings: any setting of the training and option of the recipe; a list is several values.

    Raises:
        UserError: a mistake in any of the values, before the first training; or a training failed.
    """
    check_may_start("sweep")
    for name, number in (("at_once", at_once), ("sample", sample)):
        if number is not None and number < 1:
            raise UserError(f"sweep({name}={number}): it must be 1 or more.")
    plan, calls = _plan(what, folder, sample, settings, optuna=optuna)
    chooser = OptunaChoice(plan) if optuna else None
    of_points = dict(zip(map(repr, plan.points.values()), calls.values(), strict=True))
    some = [*plan.points.values()][:MOST]  # Optuna may choose from more
    checked = check_trainings(some, lambda point: request_of(of_points[repr(point)], "sweep"), 1)
    one = checked[-1].settings
    number, gpus = num_at_once(at_once, 1, one.device, oversubscribe=one.oversubscribe)
    plan.begin()
    failed: list[EndedTraining] = []

    def tell(ended: EndedTraining) -> None:
        if ended.status == "failed":
            failed.append(ended)
        if not quiet:
            sys.stdout.write(f"{ended.status:<9}  {ended.name}  {ended.text}\n")

    with tempfile.TemporaryDirectory(prefix="samestep-") as place:

        def start(name: str) -> tuple[list[str], Mapping[str, str]]:
            file = Path(place, str([*calls].index(name)), "call")
            file.parent.mkdir()
            send(calls[name], file)
            return ["train"], {TASK: str(file)}

        code = run_here(plan, start, number, tell, gpus=gpus, chooser=chooser)
    if failed:
        first = failed[0]
        many = f"{len(failed)} of the trainings failed"
        raise UserError(f"{many}. {first.name}: {first.text}")
    if code > 128:
        raise KeyboardInterrupt
    begun = [(plan.run_dir(name), one.recipe) for name, one in calls.items()]
    return [TrainedRun(run, recipe) for run, recipe in begun if run.is_dir()]


def _plan(
    what: AnyPath | Recipe,
    folder: AnyPath | None,
    sample: int | None,
    settings: dict[str, Any],
    *,
    optuna: bool,
) -> tuple[SweepPlan, dict[str, Call]]:
    """Return the sweep that the arguments make, and the call of each of its trainings."""
    lists = {name: [*v] for name, v in settings.items() if isinstance(v, list) and len(v) > 1}
    if empty := next((k for k, v in settings.items() if isinstance(v, list) and not v), None):
        raise UserError(f"sweep({empty}=[]): the list of its values is empty.")
    same = {name: v[0] if isinstance(v, list) else v for name, v in settings.items()}
    same = {name: value for name, value in same.items() if name not in lists}
    for name in ("run_dir", "resume"):
        if name in settings:
            raise UserError(f"sweep({name}=…): give folder=; a sweep resumes by itself.")
    if (number := num_points({k: [*map(str, v)] for k, v in lists.items()}, sample)) > MOST:
        raise UserError(f"sweep(): {number:,} trainings. Train some of them with sample=50.")
    axes = {name.replace("_", "-"): tuple(map(_text, v)) for name, v in lists.items()}
    for name, texts in axes.items():
        if len({*texts}) < len(texts):
            raise UserError(f"sweep({name.replace('-', '_')}=…): a value comes twice.")
    label = (what.name or "recipe") if isinstance(what, Recipe) else str(path_of(what, "what"))
    flags = tuple(f"{name}={value}" for name, value in same.items())
    asked = [*flags, *map(str, axes.items()), f"sample={sample}"]
    asked += ["optuna"] * optuna
    seed = lists["seed"][0] if "seed" in lists else same.get("seed", 42)
    plan = SweepPlan(
        folder=(path_of(folder, "folder") if folder else default_folder(label, asked)).absolute(),
        recipe=label,
        flags=flags,
        axes=axes,
        sample=sample,
        optuna=optuna,
        seed=seed,
    )
    calls = {
        name: _call(what, same | _values(point, axes, lists), plan.run_dir(name))
        for name, point in plan.points.items()
    }
    return plan, calls


def _call(what: AnyPath | Recipe, keywords: dict[str, Any], run: Path) -> Call:
    return call_of(what, keywords=keywords | {"run_dir": str(run)}, resume=True)


def _values(
    point: Mapping[str, str], axes: Mapping[str, Sequence[str]], lists: Mapping[str, Sequence[Any]]
) -> dict[str, Any]:
    """Return the values that the texts of a point stand for."""
    names = dict(zip(axes, lists, strict=True))
    return {names[k]: lists[names[k]][axes[k].index(text)] for k, text in point.items()}


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
