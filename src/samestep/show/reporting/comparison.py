"""Put some runs side by side: everything that is said of them, before it is shown.

Code is compared by file and line. A job keeps a copy of all its code; any other run keeps the file
of its recipe or script, and the modules of the user's own that a recipe imports.
"""

import difflib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from samestep.base.errors import UserError
from samestep.base.run import code_pieces
from samestep.base.run.code_copy import CODE, kept_code
from samestep.base.run.code_pieces import file_pieces, module_path
from samestep.base.run.directory import SWEEP, is_run
from samestep.base.run.files import read_object
from samestep.base.run.records import Record
from samestep.base.run.user_modules import kept_modules
from samestep.base.settings import Settings, free_names
from samestep.base.words import as_typed
from samestep.show.reporting import curves
from samestep.show.reporting.run_data import TRAIN_LOSS, RunData, read_run

MOST = 26


@dataclass(frozen=True, kw_only=True)
class SettingDifference:
    """One setting, or fact, that is not the same in all runs."""

    name: str
    values: tuple[str, ...]
    """One a run: `?` where the run does not tell, `–` where it is not set."""
    decides: bool  # whether it makes another training of it


@dataclass(frozen=True, kw_only=True)
class SameTraining:
    """How far a run is from the one it is held against, by the losses that both have recorded."""

    verdict: Literal["equal", "rounding", "apart", "unknown"]
    why: str = ""  # why nothing can be said, for `unknown`
    steps: int = 0
    epochs: int = 0  # epochs whose mean training loss both have recorded
    evaluations: int = 0
    """Evaluations on the validation set that both have recorded, if they are compared."""
    evaluated_otherwise: int | None = None
    """The first step at which evaluations differ though training losses stay alike: they are
    measured otherwise, and left out."""
    evaluations_apart: float = 0.0  # largest difference of such evaluations' losses
    largest: float = 0.0  # largest difference of the loss
    largest_at: int = 0  # the step of it
    largest_norm: float | None = None
    """Largest relative difference of the gradient norm, if both have it."""
    first_apart: int | None = None
    """The first step with a loss that differs by more than rounding."""
    last_alike: int | None = None  # the last recorded step before it
    weights_sha256: str = ""
    """Of the weights after the last step for which both have recorded it, if it is the same."""
    weights_step: int | None = None  # that step; None if there is none
    tolerance: float = 0.0  # what rounding explains, relative to the largest loss


class Comparison:
    """Some runs side by side; lists have an entry a run unless they say otherwise."""

    def __init__(self, runs: list[RunData], metric: str, target: float | None) -> None:
        self.runs, self.metric, self.target = runs, metric, target
        self.names = [chr(ord("A") + place) for place in range(len(runs))]
        """What the runs are called in tables: A, B, C …."""
        self.differences = differences(runs)
        """An entry a setting, or fact."""
        self.same_training = [compare_losses(runs[0], run) for run in runs[1:]]
        """Each run but the first, held against the first."""
        self.code = [code_changes(runs[0].path, run.path) for run in runs[1:]]
        """Which files of each differ from the first run's; None where one keeps no code."""
        self.throughput = [curves.throughput(run) for run in runs]
        self.phases = [curves.phases(run) for run in runs]
        """Milliseconds of a step on rank 0."""
        self.pauses = [curves.pauses(run) for run in runs]
        self.curves = curves.curves_of(runs, metric)
        self.by_samples = curves.by_samples(self.curves)
        self.by_seconds = curves.by_seconds(self.curves)
        directions = [run.smaller_is_better(metric) for run in runs]
        # A loop of the user's own does not say; of its metrics only a loss is known to fall.
        self.smaller = next(
            (is_so for is_so in directions if is_so is not None), metric.endswith("loss")
        )
        """Whether the metric is to fall."""
        self.pick_best = min if self.smaller else max
        self.best = [
            self.pick_best((point.value for point in curve), default=None) for curve in self.curves
        ]
        self.reached: list[curves.Goal | None] = []
        """Empty without a target."""
        if target is not None:
            self.reached = [
                curves.reached(run, curve, target, smaller=self.smaller)
                for run, curve in zip(runs, self.curves, strict=True)
            ]
        self.notes = _notes(runs, self.throughput)


def check_target(target: float | None) -> None:
    """Check that a metric can ever be at a target."""
    if target is not None and not math.isfinite(target):
        raise UserError(f"--target {target} is not finite. Choose one that the metric can reach.")


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
    """
    check_target(target)
    paths = with_sweeps_opened(paths)
    if len(paths) < 2 - alone:
        raise UserError(
            "Name two or more runs: samestep compare runs/ID runs/ID. --plot needs one."
        )
    if len(paths) > MOST:
        raise UserError(f"{len(paths)} runs are more than can be shown; name at most {MOST}.")
    for path, other in pairwise(sorted(path.resolve() for path in paths)):
        if path == other:
            raise UserError(f"{path} is named twice; name each run once.")
    runs = [read_run(path) for path in paths]
    if num_recipes(runs) > 1 and not any_recipe:
        raise UserError(
            f"These runs cannot be compared: {_list(runs)}. Losses of different recipes measure "
            "different things; name runs of one recipe, or add --any-recipe if data and loss are "
            "the same."
        )
    comparison = Comparison(runs, metric or _default_metric(runs), target)
    if metric is not None and not any(comparison.curves):
        had = "; ".join(f"{run.path}: {', '.join(run.metrics()) or 'none'}" for run in runs)
        raise UserError(f"No run has a metric {metric!r}. The metrics are: {had}.")
    return comparison


def with_sweeps_opened(paths: Sequence[Path]) -> list[Path]:
    """Return paths with the runs of a sweep in place of its folder."""
    opened: list[Path] = []
    for path in paths:
        points = read_object(path / SWEEP).get("points")
        runs = [path / name for name in points if is_run(path / name)] if points else []
        opened += runs or [path]
    return opened


def _list(runs: Sequence[RunData]) -> str:
    by_recipe: dict[str, list[str]] = {}
    for run in runs:
        by_recipe.setdefault(run.recipe or "unknown", []).append(str(run.path))
    return ", ".join(
        f"{first}{f' and {len(others)} more are' if others else ' is'} of recipe {recipe}"
        for recipe, (first, *others) in by_recipe.items()
    )


def _default_metric(runs: Sequence[RunData]) -> str:
    """Return the first of accuracy, loss and training loss that all have, or else any has."""
    metrics = [run.metrics() for run in runs]
    usual = [(has, name) for has in (all, any) for name in ("accuracy", "loss", TRAIN_LOSS)]
    return next((name for has, name in usual if has(name in of for of in metrics)), TRAIN_LOSS)


def num_recipes(runs: Sequence[RunData]) -> int:
    """Return the number of different recipes among the runs."""
    return len({run.recipe for run in runs if run.recipe})


def _notes(runs: list[RunData], speeds: list[curves.Throughput | None]) -> list[str]:
    notes = []
    if num_recipes(runs) > 1:
        notes.append(f"The recipes differ ({_list(runs)}): their losses may not be comparable.")
    batches = {run.plan["global_batch_size"] for run in runs if run.plan}
    if len(batches) > 1:
        sizes = ", ".join(f"{size:,}" for size in sorted(batches))
        notes.append(f"Global batches differ ({sizes} samples): compare per sample, not per step.")
    bases = {speed.basis.split()[0] for speed in speeds if speed}
    if len(bases) > 1:
        notes.append("Throughput is measured over epochs in some runs, over a few steps in others.")
    hosts = {run.facts.get("host") for run in runs} - {None}
    if len(hosts) > 1:
        notes.append("The runs are from different machines, which also changes their speeds.")
    return notes


# Derived, or of where and how fast: the training is the same without them.
_SAME_TRAINING = free_names(Settings) | {
    *("engine", "world_size", "num_nodes", "host", "cores_usable"),
    *("samestep", "python", "torch", "cuda", "sync_batchnorm", "monitor", "mode", "precision"),
}
_LENGTH = frozenset({"epochs", "max_steps"})
# The plan has these as the settings do. Of the same name, but something else, are `num_samples` (an
# option of spiral) and `device` (what was asked for).
_SIZES = ("batch_size", "micro_batch_size", "accumulate")
UNKNOWN, UNSET = "?", "–"


def differences(runs: Sequence[RunData]) -> list[SettingDifference]:
    """Return the differing settings, then those of the machines; each in its usual order."""
    settings = dict.fromkeys(name for run in runs for name in run.settings or {})
    facts = dict.fromkeys(name for run in runs for name in run.facts if name not in settings)
    same = _SAME_TRAINING.union(*(run.plan.get("free_options", ()) for run in runs))
    cosine = any((run.settings or {}).get("schedule") == "cosine" for run in runs)
    if cosine or any(run.plan.get("own_schedule") for run in runs):
        same -= _LENGTH  # the learning rate of a step depends on it
    differing = []
    for name in (*settings, *facts):
        values = tuple(_value(run, name, is_fact=name in facts) for run in runs)
        if len({value for value in values if value != UNKNOWN}) > 1:
            # A loop of the user's own has none of a recipe's settings, and the other way round.
            have = {run.own_loop for run, value in zip(runs, values, strict=True) if value != UNSET}
            comparable = {v for run, v in zip(runs, values, strict=True) if run.own_loop in have}
            decides = name not in same and len(comparable) > 1
            differing.append(SettingDifference(name=name, values=values, decides=decides))
    return differing


def _value(run: RunData, name: str, *, is_fact: bool) -> str:
    if run.settings is not None and name in run.settings:
        return as_typed(run.settings[name])
    if name in run.facts and (is_fact or (run.settings is None and name in _SIZES)):
        return as_typed(run.facts[name])
    return UNKNOWN if is_fact or run.settings is None else UNSET


# What only the order of sums changes, relative to the largest loss, by precision; correct code
# was measured to stay 10 times below it for hundreds of steps, missing synchronisation 1,000 above.
_TOLERANCES = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}


def compare_losses(first: RunData, other: RunData) -> SameTraining:
    """Compare the losses of equal steps, epochs and evaluations, and gradient norms of steps."""
    if not first.plan or not other.plan:
        return SameTraining(verdict="unknown", why="one of them has no start record")
    sizes = {"num_samples": "training samples", "global_batch_size": "samples per step"}
    for name, unit in sizes.items():
        mine, its = first.plan[name], other.plan[name]
        if mine != its:
            its, mine = ("a stream" if n is None else f"{n:,}" for n in (its, mine))
            why = f"{its} {unit} against {mine}, so equal steps are different work"
            return SameTraining(verdict="unknown", why=why)
    ours, theirs = _losses(first), _losses(other)
    both = sorted((key for key in ours if key in theirs), key=lambda key: key[1])
    if not both:
        why = "no step, epoch or evaluation is recorded in both (--log-every)"
        return SameTraining(verdict="unknown", why=why)
    tolerance = max(
        _TOLERANCES.get(str(run.plan.get("precision", "fp32")), 1e-5) for run in (first, other)
    )
    # Rounding is of the sums that a loss is made of: where it falls to nothing, they do not.
    scale = max(abs(ours[key]["loss"]) for key in both)
    measured = [
        (kind, step, abs(ours[kind, step]["loss"] - theirs[kind, step]["loss"]))
        for kind, step in both
    ]
    measured_otherwise = _evaluated_otherwise(measured, tolerance * scale)
    both = [key for key in both if not (measured_otherwise and key[0] == "evaluation")]
    gaps = [(gap, step) for kind, step, gap in measured if (kind, step) in both]
    pairs = [(ours[key], theirs[key]) for key in both]
    largest, at = max(gaps, key=lambda gap: gap[0])
    far = [step for gap, step in gaps if gap > tolerance * scale]
    norms = [(a.get("grad_norm"), b.get("grad_norm")) for a, b in pairs]
    apart = [abs(a - b) / max(abs(a), 1e-12) for a, b in norms if a is not None and b is not None]
    before = [step for _, step in gaps if not far or step < far[0]]
    kinds = [kind for kind, _ in both]
    weighed = max(first.weights.keys() & other.weights.keys(), default=None)
    digests = set() if weighed is None else {first.weights[weighed], other.weights[weighed]}
    differ = largest or any(apart) or len(digests) > 1
    return SameTraining(
        verdict="apart" if far else "rounding" if differ else "equal",
        weights_sha256=digests.pop() if len(digests) == 1 else "",
        weights_step=weighed,
        steps=kinds.count("step"),
        epochs=kinds.count("epoch"),
        evaluations=kinds.count("evaluation"),
        largest=largest,
        largest_at=at,
        largest_norm=max(apart, default=None),
        first_apart=far[0] if far else None,
        last_alike=before[-1] if before else None,
        tolerance=tolerance,
        **measured_otherwise,
    )


def _evaluated_otherwise(measured: list[tuple[str, int, float]], most: float) -> dict[str, Any]:
    """Return the evaluations that differ although the weights did not: later losses are equal.

    Args:
        measured: kind, step and difference of each loss that both runs have.
        most: the largest difference that rounding explains.
    """
    trained = [(step, gap) for kind, step, gap in measured if kind != "evaluation"]
    apart = min((step for step, gap in trained if gap > most), default=math.inf)
    last_equal = max((step for step, _ in trained if step < apart), default=-1)
    evaluated = [(step, gap) for kind, step, gap in measured if kind == "evaluation"]
    far = [step for step, gap in evaluated if most < gap and step <= last_equal]
    if not far:
        return {}
    return {"evaluated_otherwise": far[0], "evaluations_apart": max(gap for _, gap in evaluated)}


def _losses(run: RunData) -> dict[tuple[str, int], Record]:
    """Return the records that have a loss of this training, by kind and step; not of the test."""
    return {
        (kind, record["step"]): record
        for kind in ("step", "epoch", "evaluation")
        for record in run.of(kind)
        if record.get("split", "validation") == "validation"
        and isinstance(record.get("loss"), int | float)
    }


_LONGEST = 500_000  # bytes of a file that is still compared by line


@dataclass(frozen=True, kw_only=True)
class CodeChange:
    """A file that is not the same in two runs."""

    file: str
    change: Literal["edited", "new", "gone"]
    added: int = 0
    removed: int = 0
    diff: str = ""  # unified; empty where a file is not text, or too long
    functions: tuple[str, ...] = ()
    """Functions, classes and values that are not the same in both versions of a Python file."""

    @property
    def short(self) -> str:
        """Say it in a cell of a table."""
        lines = f"+{self.added} -{self.removed}" if self.diff else "other bytes"
        return lines if self.change == "edited" else f"{self.change}, {lines}"


def code_changes(first: Path, other: Path) -> list[CodeChange] | None:
    """Return the changes from the first run's code to the other's; None if one has no copy."""
    if kept_code(first) and kept_code(other):
        before, after = dict(_files(first / CODE)), dict(_files(other / CODE))
    else:
        main_files = _main_file(first), _main_file(other)
        if main_files[0] is None or main_files[1] is None:
            return None
        name = next(
            (path.name for path in main_files if path and path.parent.name == CODE),
            main_files[0].name,
        )
        before, after = {name: main_files[0]}, {name: main_files[1]}
        modules = [copied for run in (first, other) if (copied := kept_modules(run)) is not None]
        if len(modules) == 2:
            for files, copied in zip((before, after), modules, strict=True):
                files |= {module_path(*item): item[1] for item in copied.files.items()}
    changes = (_change(name, before, after) for name in sorted({*before, *after}))
    return [change for change in changes if change is not None]


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the copied files: links lead to data, which is not part of the run."""
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names:
            path = Path(here, name)
            if path.is_file() and not path.is_symlink():
                yield path.relative_to(folder).as_posix(), path


def _main_file(run: Path) -> Path | None:
    entry = kept_code(run).get("file")
    files = [run / CODE / entry] if isinstance(entry, str) else []
    return next((f for f in (*files, run / "recipe.py", run / "script.py") if f.is_file()), None)


def _change(name: str, before: dict[str, Path], after: dict[str, Path]) -> CodeChange | None:
    old, new = (files[name].read_bytes() if name in files else None for files in (before, after))
    if old == new:
        return None
    change: Literal["edited", "new", "gone"] = "edited"
    if old is None or new is None:
        change = "new" if old is None else "gone"
    first, second = _lines(old), _lines(new)
    if first is None or second is None:
        return CodeChange(file=name, change=change)
    functions: list[str] = []
    if change == "edited" and name.endswith(".py"):
        functions = code_pieces.differences(file_pieces(before[name]), file_pieces(after[name]))
    lines = [*difflib.unified_diff(first, second, f"a/{name}", f"b/{name}", lineterm="")]
    body = lines[2:]
    return CodeChange(
        file=name,
        change=change,
        added=sum(line.startswith("+") for line in body),
        removed=sum(line.startswith("-") for line in body),
        diff="\n".join(lines),
        functions=tuple(functions),
    )


def _lines(content: bytes | None) -> list[str] | None:
    """Return a file's lines; None where it is not text, or too long."""
    if not content:
        return []
    if len(content) > _LONGEST or b"\0" in content:
        return None
    try:
        return content.decode().removesuffix("\n").split("\n")
    except UnicodeDecodeError:
        return None
