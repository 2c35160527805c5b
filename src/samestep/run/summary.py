"""All runs of a folder in a line each, running, killed and damaged ones too, in little time."""

import errno
import json
import math
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from samestep.errors import UserError
from samestep.nearby import nearby
from samestep.run.directory import is_run
from samestep.run.ending import Ending, how_it_ended
from samestep.run.glimpse import Glimpse, Line, glimpse, open_regular, validations
from samestep.run.records import RUN_FORMAT

State = Ending | Literal["damaged"]
STATES: tuple[State, ...] = (*get_args(Ending), "damaged")
Sort = Literal["name", "recipe", "state", "metric", "duration", "date"]

_MOST_BYTES = 2**24
"""No result, no index and no settings of a run are larger; what is larger is not read."""
_MOST_SECONDS = 1e11
"""What is more is no time: it would be the year 5138."""
_MOST_INSIDE = 1000
"""So many entries of a folder that is no run itself are looked at for runs in it."""
_FILES = ("events.jsonl", "settings.toml", "result.json")
"""A folder that has none of them is no run."""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One run in short. What nothing tells is None, or empty."""

    name: str
    """Of its directory, below the folder that was listed."""
    run_dir: Path
    state: State
    """`killed` of one that has recorded no end, `damaged` of one whose files cannot be read."""
    reason: str = ""
    """Why it ended so, or what is damaged."""
    recipe: str = ""
    metric: str | None = None
    """The monitored metric."""
    mode: Literal["min", "max"] | None = None
    """Whether less or more of it is better."""
    value: float | None = None
    """Its best."""
    seconds: float | None = None
    """Of training; evaluations and checkpoints are not in it."""
    epochs: int = 0
    """Epochs that have ended."""
    steps: int = 0
    world_size: int | None = None
    """Ranks of the latest attempt."""
    started: float | None = None
    """When it began, in seconds since 1970."""
    losses: tuple[float, ...] = ()
    """Training losses of epochs, or of steps where no epoch has ended; NaN where it is not finite.
    Of a run with large records some, evenly spread."""


def read_runs(folder: Path | str = "runs") -> list[RunSummary]:
    """Return what is known of each run in a folder, the newest first.

    Runs are also found in folders of it that are no runs themselves. Hidden entries are left out,
    and so are files like notes.txt and folders without a run.

    Raises:
        UserError: the folder cannot be read, or is itself a run.
    """
    folder = Path(folder)
    try:
        itself = is_run(folder) or (folder / "events.jsonl").is_file()
        entries = _entries(folder)
    except OSError as error:
        raise UserError(
            f"{folder} cannot be read: {error.strerror}. Name a folder with runs, such as runs/."
            f"{nearby(folder, 'runs')}"
        ) from error
    if itself:
        above = folder.absolute().parent if folder.name in ("", "..") else folder.parent
        raise UserError(
            f"{folder} is itself a run. Name the folder that it is in: samestep runs {above}"
        )
    found = [run for name in entries for run in _runs_at(folder, name)]
    return sorted_runs(found, "date")


def sorted_runs(runs: Iterable[RunSummary], by: Sort) -> list[RunSummary]:
    """Return runs in an order: `metric` has the best first, `duration` the longest."""
    newest = sorted(runs, key=lambda run: -math.inf if run.started is None else run.started)
    newest.reverse()
    if by == "date":
        return newest
    if by == "duration":
        return sorted(newest, key=lambda run: -(run.seconds or 0.0))
    if by == "metric":
        return sorted(newest, key=_rank)
    if by == "state":
        return sorted(newest, key=lambda run: STATES.index(run.state))
    return sorted(newest, key=lambda run: run.name if by == "name" else run.recipe)


def _rank(run: RunSummary) -> tuple[bool, str, float]:
    """Return a key for the best first; metrics of different names do not compare."""
    if run.value is None:
        return True, "", 0.0
    return False, run.metric or "", run.value if run.mode == "min" else -run.value


def _entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def _runs_at(folder: Path, name: str) -> Iterator[RunSummary]:
    """Yield the run of this name, or the runs in a folder of this name."""
    path = folder / name
    try:
        if not path.is_dir():
            path.stat()  # a link that leads nowhere, or to itself, is told
            if not path.suffix:
                yield _damaged(name, path, "it is a file, not a directory")
            return
        if any((path / file).exists() for file in _FILES):
            if (run := _summary(name, path)) is not None:
                yield run
            return
        inside = _entries(path)
        if not inside:
            yield _damaged(name, path, "it is empty")
        for other in inside[:_MOST_INSIDE]:
            below = path / other
            if is_run(below) and (run := _summary(f"{name}/{other}", below)) is not None:
                yield run
    except OSError as error:
        yield _damaged(name, path, f"it cannot be read: {error.strerror}")


def _damaged(name: str, path: Path, reason: str) -> RunSummary:
    return RunSummary(name=name, run_dir=path, state="damaged", reason=reason)


def _summary(name: str, path: Path) -> RunSummary | None:
    """Return a run in short; None for what `samestep profile` wrote, which is no training."""
    damage: list[str] = []
    seen = _glimpse(path / "events.jsonl", damage)
    if not seen.size and (path / "profile.json").exists():
        return None
    last = {} if seen.last is None else msgspec.to_builtins(seen.last)
    result = _object(path / "result.json", damage)
    state, reason = how_it_ended(path, last, result)
    # An earlier attempt's result does not speak for a later one, nor for one that runs.
    is_of_latest = not seen.size or result.get("steps", seen.steps) == seen.steps
    ended = result if is_of_latest and state not in ("running", "killed") else {}
    metric, mode, value = _best(path, seen, ended, damage)
    start, latest = seen.start or Line(""), seen.latest or Line("")
    recipe = _recipe(path, latest.recipe or result.get("recipe"), damage)
    return RunSummary(
        name=name,
        run_dir=path,
        state="damaged" if damage else state,
        reason=damage[0] if damage else reason,
        recipe=recipe,
        metric=metric,
        mode=mode,
        value=value,
        seconds=_seconds(ended.get("training_seconds"), seen.seconds),
        epochs=_whole(ended.get("epochs"), seen.epochs) or 0,
        steps=_whole(ended.get("steps"), seen.steps) or 0,
        world_size=_whole(latest.world_size, ended.get("world_size")),
        started=_seconds(start.time, _written_at(path)),
        losses=seen.losses,
    )


def _glimpse(file: Path, damage: list[str]) -> Glimpse:
    """Return what the records say; of a run that has not begun there are none."""
    try:
        seen = glimpse(file)
    except FileNotFoundError:
        if (file.parent / "checkpoints").is_dir() and (file.parent / "result.json").exists():
            damage.append("events.jsonl is missing")
        return Glimpse()
    except OSError as error:
        damage.append(f"events.jsonl cannot be read: {error.strerror}")
        return Glimpse()
    if seen.start is None and seen.size:
        damage.append("events.jsonl has no start record")
    elif seen.latest and seen.latest.format > RUN_FORMAT:
        damage.append(f"its run format {seen.latest.format} is newer than this samestep")
    return seen


def _object(file: Path, damage: list[str]) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if there is none."""
    try:
        # Earlier versions wrote NaN and Infinity, which are no JSON.
        found = json.loads(_content(file), parse_constant=lambda _: None)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        damage.append(f"{file.name} is damaged")
        return {}
    return found


def _content(file: Path) -> bytes:
    """Return what is in a small file.

    Raises:
        OSError: it cannot be read, or is too large.
    """
    with open_regular(file) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > _MOST_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(file))
        return os.read(descriptor, size)


def _best(
    path: Path, seen: Glimpse, result: Mapping[str, Any], damage: list[str]
) -> tuple[str | None, Literal["min", "max"] | None, float | None]:
    """Return the monitored metric, its direction and its best: of the result, else so far."""
    start = seen.latest or Line("")
    best, index = result.get("best"), {}
    table: dict[str, Any] = best if isinstance(best, dict) else {}
    if _number(table.get("value")) is None or "mode" not in table:
        index = _object(path / "checkpoints" / "index.json", damage)
    metric = table.get("metric") or start.monitor or _monitored(index)
    if not isinstance(metric, str):
        return _usual(path)
    mode: Literal["min", "max"] = "max"
    told = table.get("mode") or (index.get("mode") if metric == index.get("monitor") else None)
    falls = metric == "loss" or metric in (start.lower_is_better or ())
    if told == "min" or (told != "max" and falls):
        mode = "min"
    value = _number(table.get("value"))
    kept = index.get("best") if index.get("monitor") == metric else None
    if value is None and isinstance(kept, dict):
        value = _number(kept.get("metric"))
    if value is None and not result:
        value = _evaluated(path, metric, mode)
    return metric, mode, value


def _usual(path: Path) -> tuple[str | None, Literal["min", "max"] | None, float | None]:
    """Return the best of what is usually monitored, of a loop of one's own that named nothing."""
    modes: tuple[tuple[str, Literal["min", "max"]], ...] = (("accuracy", "max"), ("loss", "min"))
    for metric, mode in modes:
        value = _evaluated(path, metric, mode)
        if value is not None:
            return metric, mode, value
    return None, None, None


def _monitored(index: Mapping[str, Any]) -> object:
    """Return what an index ranks by; a loop of one's own ranks nothing."""
    return index.get("monitor") if isinstance(index.get("best"), dict) else None


def _evaluated(path: Path, metric: str, mode: Literal["min", "max"]) -> float | None:
    """Return the best of the evaluations that are recorded, where no checkpoint tells it."""
    try:
        found = [_number(record.get(metric)) for record in validations(path / "events.jsonl")]
    except OSError:
        return None
    pick = min if mode == "min" else max
    return pick((value for value in found if value is not None), default=None)


def _recipe(path: Path, told: object, damage: list[str]) -> str:
    """Return the recipe's name; of a run that has not begun, its settings tell it."""
    if not told and (path / "settings.toml").is_file():
        try:
            told = tomllib.loads(_content(path / "settings.toml").decode()).get("recipe")
        except (OSError, ValueError, RecursionError):
            damage.append("settings.toml is damaged")
    return Path(told).stem if isinstance(told, str) else ""


def _written_at(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _number(value: object) -> float | None:
    """Return a finite number as such, and None for whatever else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e300 else None  # type: ignore[arg-type]


def _seconds(*values: object) -> float | None:
    """Return the first of some values that may be seconds, of a training or since 1970."""
    numbers = (_number(value) for value in values)
    return next((n for n in numbers if n is not None and 0 <= n < _MOST_SECONDS), None)


def _whole(*values: object) -> int | None:
    """Return the first of some values that is a count."""
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool)), None)
