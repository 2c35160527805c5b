"""`samestep.sweep`: a recipe with many settings from Python, a run each.

The verb is made of its signature and docstring, so PyTorch is imported in the functions.
"""

import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.base.errors import UserError
from samestep.cluster.sweeping.side_by_side import EndedTraining, num_at_once, run_here
from samestep.cluster.sweeping.sweep_plan import (
    MOST,
    OptunaChoice,
    Point,
    SweepPlan,
    make_plan,
    num_points,
)
from samestep.launch.ranks.process import TASK
from samestep.shell.api.arguments import AnyPath, check_positive, one_line_errors, path_of

if TYPE_CHECKING:
    from samestep.core.recipe import Recipe
    from samestep.core.session.request import Request
    from samestep.shell.api.call import Call
    from samestep.shell.api.trained_run import TrainedRun


@one_line_errors
def sweep(
    what: "AnyPath | Recipe",
    *,
    folder: AnyPath | None = None,
    at_once: int | None = None,
    sample: int | None = None,
    optuna: bool = False,
    quiet: bool = False,
    **settings: Any,
) -> "list[TrainedRun]":
    """Train a recipe once for each combination of the values; return the runs, in that order.

        runs = samestep.sweep("spiral", lr=[1e-3, 1e-2], hidden_dims=[(64, 32), (128, 64)])
        samestep.runs("runs/mine", sort="metric")

    Each training is a process of its own. Called again with the same arguments, it continues where
    it was: what has completed is not trained again. Ctrl-C stops all trainings, saved.

    Args:
        what: A recipe's name, its file, or a `samestep.Recipe`, which may be made in a notebook.
        folder: The sweep's folder; by default one in runs/ that the arguments decide.
        at_once: Trainings that run at the same time; by default one per GPU, else one per core.
        sample: Train only this many combinations, drawn at random with the seed.
        optuna: Let Optuna choose the combinations of `sample` from the results so far.
        quiet: Show nothing.
        settings: Any setting of the training and option of the recipe; a list is several values.

    Raises:
        UserError: a mistake in any of the values, before the first training; or a training failed.
    """
    from samestep.shell.api.call import check_may_start, request_of, send  # noqa: PLC0415 - they import torch
    from samestep.shell.api.trained_run import TrainedRun  # noqa: PLC0415

    check_may_start("sweep")
    check_positive(at_once=at_once, sample=sample)
    plan, calls = _plan(what, folder, sample, settings, optuna=optuna)
    chooser = OptunaChoice(plan) if optuna else None
    of_points = dict(zip(map(repr, plan.points.values()), calls.values(), strict=True))
    some = [*plan.points.values()][:MOST]  # Optuna may choose from more
    checked = check_trainings(some, lambda point: request_of(of_points[repr(point)], "sweep"), 1)
    training = checked[-1].settings
    number, gpus = num_at_once(at_once, 1, training.device, oversubscribe=training.oversubscribe)
    plan.begin()
    failed: list[EndedTraining] = []

    def report(ended: EndedTraining) -> None:
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

        code = run_here(plan, start, number, report, gpus=gpus, chooser=chooser)
    if failed:
        first = failed[0]
        many = f"{len(failed)} of the trainings failed"
        raise UserError(f"{many}. {first.name}: {first.text}")
    if code > 128:
        raise KeyboardInterrupt
    begun = [(plan.run_dir(name), training.recipe) for name, training in calls.items()]
    return [TrainedRun(run, recipe) for run, recipe in begun if run.is_dir()]


def _plan(
    what: "AnyPath | Recipe",
    folder: AnyPath | None,
    sample: int | None,
    settings: dict[str, Any],
    *,
    optuna: bool,
) -> "tuple[SweepPlan, dict[str, Call]]":
    """Return the sweep that the arguments make, and the call of each of its trainings."""
    from samestep.core.recipe import Recipe  # noqa: PLC0415 - it imports torch
    from samestep.shell.api.call import call_of  # noqa: PLC0415

    lists = {name: [*v] for name, v in settings.items() if isinstance(v, list) and len(v) > 1}
    if empty := next((k for k, v in settings.items() if isinstance(v, list) and not v), None):
        raise UserError(f"sweep({empty}=[]): the list of its values is empty.")
    same = {name: v[0] if isinstance(v, list) else v for name, v in settings.items()}
    same = {name: value for name, value in same.items() if name not in lists}
    for name in ("run_dir", "resume", "mirror"):
        if name in settings:
            raise UserError(f"sweep({name}=…): use folder=; a sweep resumes by itself.")
    if (number := num_points({k: [*map(str, v)] for k, v in lists.items()}, sample)) > MOST:
        raise UserError(f"sweep(): {number:,} trainings. To train a part of them: sample=50.")
    axes = {name.replace("_", "-"): tuple(map(_text, v)) for name, v in lists.items()}
    for name, texts in axes.items():
        if len({*texts}) < len(texts):
            raise UserError(f"sweep({name.replace('-', '_')}=…): a value comes twice.")
    plan = make_plan(
        path_of(folder, "folder") if folder else None,
        seed=lists["seed"][0] if "seed" in lists else same.get("seed", 42),
        recipe=(what.name or "recipe") if isinstance(what, Recipe) else str(path_of(what, "what")),
        flags=tuple(f"{name}={value}" for name, value in same.items()),
        axes=axes,
        sample=sample,
        optuna=optuna,
    )
    plan = replace(plan, folder=plan.folder.absolute())
    names = dict(zip(axes, lists, strict=True))
    calls = {}
    for name, point in plan.points.items():
        # The values that the texts of the point stand for.
        values = {names[k]: lists[names[k]][axes[k].index(text)] for k, text in point.items()}
        values["run_dir"] = str(plan.run_dir(name))
        calls[name] = call_of(what, keywords=same | values, resume=True)
    return plan, calls


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def check_trainings(
    points: Iterable[Point], request_of: "Callable[[Point], Request]", num_ranks: int
) -> "list[Request]":
    """Check trainings before the first begins; return the request of each point.

    Raises:
        UserError: one would be refused, by itself or by its engine, or two are the same training.
    """
    checked: list[Request] = []
    by_request: dict[str, str] = {}
    for point in points:
        try:
            request = request_of(point)
            _check_alone(request, num_ranks)
        except UserError as error:
            if not checked:
                raise
            raise UserError(f"{error} (With {_typed(point)}; no training was started.)") from error
        training = repr((replace(request.settings, run_dir=None), request.options))
        if (other := by_request.setdefault(training, _typed(point))) != _typed(point):
            raise UserError(f"{other} and {_typed(point)} are one training. List each value once.")
        checked.append(request)
    return checked


def _check_alone(request: "Request", num_ranks: int) -> None:
    """Check what a training's settings say of its engine and its batch."""
    from samestep.core.plan import batch_sizes  # noqa: PLC0415 - it imports torch

    settings = request.settings
    if settings.engine == "lightning":
        from samestep.bridges.lightning.engine import check_settings  # noqa: PLC0415 - rarely needed

        check_settings(settings, request.recipe)
    if settings.batch_tokens is None:  # else the data decides
        virtual = settings.virtual_ranks
        batch_sizes(settings, virtual or num_ranks, "virtual ranks" if virtual else "ranks", None)


def _typed(point: Point) -> str:
    return " ".join(f"--{flag} {text}" for flag, text in point.items())
