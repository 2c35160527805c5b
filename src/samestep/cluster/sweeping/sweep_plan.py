"""Which trainings a sweep has, and which is next: the points that flags span, `sweep.json`, Optuna.

The file in the sweep's folder says what the sweep is. It is written before the first training, so
that the same command continues where it was and another one is refused.
"""

import csv
import hashlib
import itertools
import json
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from samestep.base.errors import UserError, what_to_install
from samestep.base.run.directory import SWEEP, is_run
from samestep.base.run.files import read_object, sha256_of, shown_path, write_object
from samestep.base.run.user_modules import UserModules, modules_of

LOGS = ".logs"  # in the sweep's folder: what each training printed
_FORMAT = 1
MOST = 1000  # of more trainings, the user is asked first
_MOST_TO_CHOOSE = 10_000
_LONGEST_NAME = 120
_OPTUNA_TRIES = 100
_SWITCHES = frozenset({"true", "false"})
Point = Mapping[str, str]
"""The settings in which one training differs from the others: flag → its value as text."""


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """The trainings of one recipe, each in a directory of the sweep's folder."""

    folder: Path
    recipe: str
    flags: tuple[str, ...]  # the words that all trainings share
    script_args: tuple[str, ...] = ()  # those of a script that builds a Trainer, after `--`
    axes: Mapping[str, tuple[str, ...]]
    sample: int | None = None  # train this many points, drawn at random, instead of all
    optuna: bool = False
    """Whether Optuna chooses the sample as the sweep continues, instead of one random draw."""
    seed: int = 42
    points: Mapping[str, Point] = field(init=False)
    """Each training's settings by the name of its directory; all that Optuna may choose from."""

    def __post_init__(self) -> None:
        if not self.axes:
            raise UserError("No setting has several values. Separate them by commas: --lr 0.1,0.2.")
        if self.optuna and self.sample is None:
            raise UserError("Optuna needs --sample, the number of trainings.")
        if self.optuna and num_points(self.axes) > _MOST_TO_CHOOSE:
            raise UserError(
                f"The values make {num_points(self.axes):,} combinations; Optuna chooses among at "
                f"most {_MOST_TO_CHOOSE:,}. Give fewer values, or leave Optuna out."
            )
        names, values = [*self.axes], [*self.axes.values()]
        numbers: Sequence[int] = range(num_points(self.axes))
        if not self.optuna and self.num_trainings < len(numbers):
            numbers = sorted(random.Random(self.seed).sample(numbers, self.num_trainings))  # noqa: S311
            chosen: Iterator[tuple[str, ...]] = (_at(values, number) for number in numbers)
        else:
            chosen = itertools.product(*values)
        points: dict[str, Point] = {}
        for point_values in chosen:
            point = dict(zip(names, point_values, strict=True))
            name = _name(point)
            points[_hashed(name, point) if name in points else name] = point
        object.__setattr__(self, "points", points)

    @property
    def num_trainings(self) -> int:
        """How many of the points are trained."""
        return num_points(self.axes, self.sample)

    def words(self, point: Point, *more: str) -> list[str]:
        """Return the flags of one training, with more of them; then the arguments of its script."""
        words = [*self.flags]
        for flag, text in point.items():
            if text in _SWITCHES:
                words.append(f"--{flag}" if text == "true" else f"--no-{flag}")
            else:
                words += [f"--{flag}", *text.split()]
        return [*words, *more, *(("--", *self.script_args) if self.script_args else ())]

    def run_dir(self, name: str) -> Path:
        """Return the directory of one training."""
        return self.folder / name

    def status(self, name: str) -> str:
        """Return a training's status by its result.json; empty if it has none."""
        return str(read_object(self.run_dir(name) / "result.json").get("status", ""))

    def corners(self) -> Iterator[Point]:
        """Yield each value of each axis once, together with the first values of the others."""
        first = {flag: values[0] for flag, values in self.axes.items()}
        yield first
        for flag, values in self.axes.items():
            yield from ({**first, flag: value} for value in values[1:])

    def combined(self, requests: Mapping[str, Any]) -> Callable[[Point], Any]:
        """Return a function that makes a point's request of the corners' requests, given by `repr`.

        It takes microseconds, where the words of a point take a tenth of a second to read.
        """
        first = {flag: values[0] for flag, values in self.axes.items()}
        base = requests[repr(first)]

        def differing(corner: Any, before: Any) -> dict[str, Any]:
            pairs = vars(corner).items() if before is not None else ()
            return {name: value for name, value in pairs if value != getattr(before, name)}

        def request_of(point: Point) -> Any:
            settings: dict[str, Any] = {}
            options: dict[str, Any] = {}
            for flag, text in point.items():
                corner = requests[repr({**first, flag: text})]
                settings |= differing(corner.settings, base.settings)
                options |= differing(corner.options, base.options)
            return replace(
                base,
                settings=replace(base.settings, **settings),
                options=base.options and replace(base.options, **options),
            )

        return request_of

    def as_json(self) -> dict[str, Any]:
        """Return the contents of sweep.json."""
        file = Path(self.recipe) if self.recipe.endswith(".py") else None
        return {
            "format": _FORMAT,
            "recipe": self.recipe,
            "recipe_sha256": file and sha256_of(file),
            "files_sha256": {name: sha256_of(other) for name, other in self._other_files().items()},
            "flags": [*self.flags],
            "axes": {flag: [*values] for flag, values in self.axes.items()},
            "sample": self.sample,
            **({"optuna": True} if self.optuna else {}),
            **({"script_args": [*self.script_args]} if self.script_args else {}),
            "points": {name: dict(point) for name, point in self.points.items()},
        }

    def _other_files(self) -> dict[str, Path]:
        """Return what decides besides the recipe: files of --config, modules that it imports."""
        configs = [path for flag, path in itertools.pairwise(self.flags) if flag == "--config"]
        configs += self.axes.get("config", ())
        files = {name: path for name in configs if (path := Path(name)).is_file()}
        if self.recipe.endswith(".py"):
            files |= modules_of(Path(self.recipe), UserModules()).files
        return files

    def begin(self) -> None:
        """Write sweep.json, or find that it says the same already."""
        wanted, file = self.as_json(), self.folder / SWEEP
        if is_run(self.folder):
            raise UserError(f"{self.folder} is a run. Name another folder with --run-dir.")
        before = read_object(file)
        if not before:
            (self.folder / LOGS).mkdir(parents=True, exist_ok=True)
            write_object(file, wanted)
        elif before != wanted:  # keys may be left out, such as script_args
            differs = [key for key in {**wanted, **before} if before.get(key) != wanted.get(key)]
            difference = f"({differs[0]!r} is not the same)"
            if {*differs} <= {"recipe_sha256", "files_sha256"}:
                was, now = before["files_sha256"], wanted["files_sha256"]
                others = (name for name in {**now, **was} if was.get(name) != now.get(name))
                edited = self.recipe if differs[0] == "recipe_sha256" else next(others)
                path = self._other_files().get(edited, Path(edited))
                difference = f"with {shown_path(path)} as it was before it was edited"
            raise UserError(
                f"{shown_path(file)} is of another sweep {difference}. Name another folder with "
                "--run-dir, or repeat the command that began this one.",
                flags=["run_dir"],
            )


def num_points(axes: Mapping[str, Sequence[str]], sample: int | None = None) -> int:
    """Return the number of points that the axes span, or that are drawn of them."""
    spanned = math.prod(map(len, axes.values()))
    return spanned if sample is None else min(spanned, sample)


def read_axes(words: Sequence[str]) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    """Split flags into the words that all trainings share and the flags with several values.

    `--lr 1e-4,3e-4` has two, `--hidden-dims "64 32","128 64"` has two of two words. A value with a
    comma of its own stands in quotes within the word: `--track '"comet,mlflow",none'`.
    """
    flags: list[tuple[str, list[str]]] = []  # each with the words behind it
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            flags.append((flag, [value] if equals else []))
        elif not flags:
            raise UserError(f"{word!r} stands behind no flag. A sweep has one recipe, then flags.")
        else:
            flags[-1][1].append(word)
    shared: list[str] = []
    axes: dict[str, tuple[str, ...]] = {}
    names = [flag[2:].replace("_", "-") for flag, _ in flags]
    for name, (flag, values_of_flag) in zip(names, flags, strict=True):
        text = " ".join(values_of_flag)
        if "," not in text:
            shared += [flag, *values_of_flag]
            continue
        if names.count(name) > 1:
            raise UserError(f"{flag} is given twice; write all its values behind one.")
        values = next(csv.reader([text], skipinitialspace=True))
        if any(not value.strip() for value in values):
            raise UserError(f"{flag} {text}: a value is empty. Write them as {flag} 1,2,3.")
        if again := next((v for k, v in enumerate(values) if v in values[:k]), None):
            raise UserError(f"{flag} {text}: the value {again} comes twice.")
        if len(values) == 1:
            shared += [flag, values[0]]
        else:
            axes[name] = tuple(values)
    return shared, axes


def _at(values: Sequence[Sequence[str]], number: int) -> tuple[str, ...]:
    """Return the point of this number in the order of `itertools.product`."""
    point = []
    for of_axis in reversed(values):
        number, place = divmod(number, len(of_axis))
        point.append(of_axis[place])
    return tuple(reversed(point))


def _name(point: Point) -> str:
    """Return a directory's name for a point, with a hash where letters had to be replaced."""
    text = _text(point).replace(" ", "-")
    name = re.sub(r"[^\w.,=+-]", "-", text)
    if len(name) > _LONGEST_NAME or name != text:
        name = _hashed(name[:_LONGEST_NAME], point)
    return name


def _text(point: Point) -> str:
    return ",".join(f"{flag}={text}" for flag, text in point.items())


def _hashed(name: str, point: Point) -> str:
    return f"{name}-{hashlib.sha256(_text(point).encode()).hexdigest()[:8]}"


def make_plan(folder: Path | None, *, seed: int, **asked: Any) -> SweepPlan:
    """Return the sweep that is asked for; without a folder, in one in runs/ that all else decides.

    `asked` are the other fields.
    """
    if folder is None:
        words = [*asked["flags"], *(f"{flag}={texts}" for flag, texts in asked["axes"].items())]
        words += [f"sample={asked['sample']}", *["optuna"] * asked["optuna"]]
        words += asked.get("script_args", ())
        key = hashlib.sha256(json.dumps([asked["recipe"], *words]).encode()).hexdigest()[:8]
        folder = Path("runs") / f"sweep-{Path(asked['recipe']).stem}-{key}"
    return SweepPlan(folder=folder, seed=seed, **asked)


class OptunaChoice:
    """Optuna's choice of the next training, by those that have ended.

    It takes `sweep.num_trainings` of the points by a tree-structured Parzen estimator, in which
    each flag is a categorical parameter: Bergstra et al. 2011, "Algorithms for Hyper-Parameter
    Optimization". It needs no database: after a kill, the study is rebuilt from the runs.

    Raises UserError if Optuna is not installed.
    """

    def __init__(self, sweep: SweepPlan) -> None:
        try:
            import optuna  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise UserError(f"--optuna needs Optuna. {what_to_install(error)}") from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._sweep = sweep
        self._failed = optuna.trial.TrialState.FAIL
        # Trainings that still run count as bad, lest the next are all next to them.
        sampler = optuna.samplers.TPESampler(seed=sweep.seed, constant_liar=True)
        self._study = optuna.create_study(sampler=sampler)
        self._space: dict[str, Any] = {
            flag: optuna.distributions.CategoricalDistribution(values)
            for flag, values in sweep.axes.items()
        }
        self._names = {tuple(point.values()): name for name, point in sweep.points.items()}
        self._trials: dict[str, Any] = {}
        self._again: list[str] = []
        for name in sweep.points:
            if sweep.status(name) == "completed":
                self._begin(name)
                self.ended(name)
            elif sweep.run_dir(name).is_dir():
                self._again.append(name)

    def next(self) -> str:
        """Return the training to start next; an empty text if there are enough."""
        if self._again:
            return self._begin(self._again.pop(0))
        if len(self._trials) == self._sweep.num_trainings:
            return ""
        for _ in range(_OPTUNA_TRIES):
            trial = self._study.ask(self._space)
            name = self._names[tuple(trial.params[flag] for flag in self._space)]
            if name not in self._trials:
                self._trials[name] = trial
                return name
            self._study.tell(trial, state=self._failed)  # it would be the same training
        return self._begin(next(name for name in self._sweep.points if name not in self._trials))

    def ended(self, name: str) -> None:
        """Report a training's best value to the study."""
        best = read_object(self._sweep.run_dir(name) / "result.json").get("best") or {}
        value = best.get("value")
        if isinstance(value, int | float) and math.isfinite(value):
            self._study.tell(self._trials[name], -value if best.get("mode") == "max" else value)
        else:
            self._study.tell(self._trials[name], state=self._failed)

    def _begin(self, name: str) -> str:
        self._study.enqueue_trial(dict(self._sweep.points[name]))
        self._trials[name] = self._study.ask(self._space)
        return name
