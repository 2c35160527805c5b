"""Put some runs side by side: everything that is said of them, before it is shown."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from samestep.comparison.curves import Aligned, Point, by_samples, by_seconds, curves_of
from samestep.comparison.run_data import TRAIN_LOSS, RunData, read_run
from samestep.comparison.same_training import SameTraining, compare_losses
from samestep.comparison.setting_differences import SettingDifference, differences
from samestep.comparison.throughput import Goal, Throughput, pauses, phases, reached, throughput
from samestep.errors import UserError

MOST = 26


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Some runs side by side; lists have an entry a run unless they say otherwise."""

    runs: list[RunData]
    differences: list[SettingDifference]
    alike: list[SameTraining]
    """Each run but the first, held against the first."""
    throughput: list[Throughput | None]
    phases: list[dict[str, float] | None]
    """Milliseconds of a step on rank 0."""
    pauses: list[dict[str, dict[str, float]]]
    metric: str
    curves: list[list[Point]]
    by_samples: Aligned | None
    by_seconds: Aligned | None
    target: float | None
    smaller: bool
    """Whether the metric is to fall."""
    reached: list[Goal | None]
    """Empty without a target."""
    notes: list[str]

    @property
    def names(self) -> list[str]:
        """What the runs are called in tables: A, B, C …."""
        return [chr(ord("A") + place) for place in range(len(self.runs))]


def check_target(target: float | None) -> None:
    """Check that a metric can ever be at a target.

    Raises:
        UserError: it is no number.
    """
    if target is not None and not math.isfinite(target):
        raise UserError(f"--target {target} is no number that a metric can reach. Give one.")


def compare_runs(
    paths: Sequence[Path],
    metric: str | None = None,
    target: float | None = None,
    *,
    any_recipe: bool = False,
    alone: bool = False,
) -> Comparison:
    """Read two runs or more from their directories and put them side by side.

    The metric is of the validation set, or `train_loss`; by default accuracy if all have it. Runs
    of different recipes are compared with `any_recipe` only, and one run is enough if `alone`.

    Raises:
        UserError: one is no run, or they have nothing in common.
    """
    check_target(target)
    _check_paths(paths, alone=alone)
    runs = [read_run(path) for path in paths]
    recipes = {run.recipe for run in runs if run.recipe}
    if len(recipes) > 1 and not any_recipe:
        raise UserError(
            f"These runs have nothing in common: {_list(runs)}. Losses of different recipes "
            "measure different things; name runs of one, or add --any-recipe if you know that "
            "they train on the same data with the same loss."
        )
    chosen = metric or _default_metric(runs)
    curves = curves_of(runs, chosen)
    if metric is not None and not any(curves):
        had = "; ".join(f"{run.path}: {', '.join(run.metrics()) or 'none'}" for run in runs)
        raise UserError(f"No run has a metric {metric!r}. Those they have: {had}.")
    speeds = [throughput(run) for run in runs]
    told = [run.smaller_is_better(chosen) for run in runs]
    # Runs of earlier versions do not say; of their metrics only a loss is known to fall.
    smaller = next((one for one in told if one is not None), chosen.endswith("loss"))
    return Comparison(
        runs=runs,
        differences=differences(runs),
        alike=[compare_losses(runs[0], run) for run in runs[1:]],
        throughput=speeds,
        phases=[phases(run) for run in runs],
        pauses=[pauses(run) for run in runs],
        metric=chosen,
        curves=curves,
        by_samples=by_samples(curves),
        by_seconds=by_seconds(curves),
        target=target,
        smaller=smaller,
        reached=[
            reached(run, curve, target, smaller=smaller)
            for run, curve in zip(runs, curves, strict=True)
            if target is not None
        ],
        notes=_notes(runs, speeds, recipes),
    )


def _check_paths(paths: Sequence[Path], *, alone: bool) -> None:
    if len(paths) < 2 - alone:
        raise UserError(
            "Name two runs or more: samestep compare runs/ID runs/ID. With --plot FILE.png one is "
            "enough."
        )
    if len(paths) > MOST:
        raise UserError(f"{len(paths)} runs are more than can be shown; name at most {MOST}.")
    for one, other in pairwise(sorted(path.resolve() for path in paths)):
        if one == other:
            raise UserError(f"{one} is named twice; name different runs.")


def _list(runs: Sequence[RunData]) -> str:
    """Return which run is of which recipe, in words."""
    by_recipe: dict[str, list[str]] = {}
    for run in runs:
        by_recipe.setdefault(run.recipe or "unknown", []).append(str(run.path))
    parts = []
    for recipe, (first, *others) in by_recipe.items():
        more = f" and {len(others)} more are" if others else " is"
        parts.append(f"{first}{more} of recipe {recipe}")
    return ", ".join(parts)


def _default_metric(runs: Sequence[RunData]) -> str:
    """Return the first of accuracy, loss and training loss that all have, or else any has."""
    found = [run.metrics() for run in runs]
    for has in (all, any):
        for metric in ("accuracy", "loss", TRAIN_LOSS):
            if has(metric in metrics for metrics in found):
                return metric
    return TRAIN_LOSS


def _notes(runs: list[RunData], speeds: list[Throughput | None], recipes: set[str]) -> list[str]:
    """Return what a reader of the tables has to know."""
    notes = []
    if len(recipes) > 1:
        notes.append(f"The recipes differ ({_list(runs)}): their losses may not be comparable.")
    batches = {run.plan["global_batch_size"] for run in runs if run.plan}
    if len(batches) > 1:
        sizes = ", ".join(f"{size:,}" for size in sorted(batches))
        notes.append(
            f"A step is not the same work in all runs (global batches of {sizes} samples): "
            "compare per sample, not per step."
        )
    bases = {speed.basis.split()[0] for speed in speeds if speed}
    if len(bases) > 1:
        notes.append("Throughput is of whole epochs in some runs and of a few steps in others.")
    hosts = {run.facts.get("host") for run in runs} - {None}
    if len(hosts) > 1:
        notes.append("The runs are of different machines: their speeds compare those too.")
    return notes
