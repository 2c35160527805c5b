"""Summaries of all runs in a folder, also of running, killed and damaged ones.

Records of a run may have hundreds of megabytes, and a folder a thousand runs. So only the kinds of
records that count are parsed, and of a large file only blocks are read.
"""

import contextlib
import errno
import json
import math
import os
import stat
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from samestep.base.errors import UserError
from samestep.base.nearby import nearby
from samestep.base.run.directory import Ending, how_it_ended, is_run
from samestep.base.run.records import RUN_FORMAT

State = Ending | Literal["damaged"]
STATES: tuple[State, ...] = (*get_args(Ending), "damaged")
Sort = Literal["name", "recipe", "state", "metric", "duration", "date"]

_MOST_BYTES = 2**24
"""Larger results, indexes and settings are not read."""
_MOST_SECONDS = 1e11
"""Later timestamps (year 5138) are treated as corrupt."""
_MOST_INSIDE = 1000
"""Search at most this many entries of a folder for runs."""
_FILES = ("events.jsonl", "settings.toml", "result.json")
"""A folder without any of them holds no run."""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One run in short. Unknown fields are None or empty."""

    name: str
    """The directory, relative to the folder that was listed."""
    run_dir: Path
    recipe: str = ""
    state: State
    """`killed` if no end was recorded, `damaged` if a file cannot be read."""
    reason: str = ""
    """Why it ended so, or what is damaged."""
    metric: str | None = None
    """The monitored metric."""
    mode: Literal["min", "max"] | None = None
    """Whether a lower or a higher value is better."""
    value: float | None = None
    """Its best."""
    seconds: float | None = None
    """Training time, without evaluations and checkpoints."""
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


class Line(msgspec.Struct, frozen=True):
    """The fields that an overview needs, of a record of any kind."""

    event: str
    time: float | None = None
    format: int = RUN_FORMAT
    recipe: str = ""
    world_size: int | None = None
    resumed: bool = False
    monitor: str | None = None
    lower_is_better: tuple[str, ...] | None = None
    epoch: int | None = None
    step: int | None = None
    loss: float | None = None
    seconds: float | None = None
    """Of a step, the seconds of training up to it."""
    train_seconds: float = 0.0
    reason: str | None = None


_WHOLE_BYTES = 2**19
"""A file of at most this size is read whole."""
_END_BYTES, _BLOCK_BYTES, _BLOCKS = 2**16, 2**14, 24
"""Of a larger file, read the first and last bytes, and evenly spaced blocks between."""
_ENOUGH = 12
"""With fewer epochs in the blocks of a large file, its curve is drawn from steps."""


_DECODER = msgspec.json.Decoder(Line)
_START, _RESUME, _EPOCH, _STEP, _EVALUATION = (
    f'{{"event": "{event}", '.encode()
    for event in ("start", "resume", "epoch", "step", "evaluation")
)
_SHAPE = (_START, _RESUME, _EPOCH)


class _Glimpse:
    """What the records of one run say, from the blocks of lines that were read of its file."""

    def __init__(self, size: int, blocks: list[list[bytes]]) -> None:
        self.size = size
        """Bytes of the file."""
        kept = _uninterrupted(_decoded(blocks, _SHAPE))
        starts = [line for line in kept if line.event == "start"]
        self.start: Line | None = starts[0] if starts else None
        self.latest: Line | None = starts[-1] if starts else None
        """The `start` records of the first and of the latest attempt."""
        self.last, step = (
            next((_line(text) for text in reversed(blocks[-1]) if text.startswith(prefix)), None)
            for prefix in (b"", _STEP)
        )
        """The last whole record."""
        epochs = {line.epoch: line for line in kept if line.event == "epoch"}  # a later one counts
        self.epochs = max((number or 0 for number in epochs), default=0)
        steps = (line.step or 0 for line in (*kept, self.last, step) if line)
        self.steps = max(steps, default=0)
        whole = size <= _WHOLE_BYTES
        seconds = [sum(line.train_seconds for line in epochs.values())] if whole and epochs else []
        seconds += [step.seconds] if step and step.seconds is not None else []
        self.seconds = max(seconds, default=None)
        """Training time, without evaluations and checkpoints; None if it is unknown."""
        drawn = list(epochs.values())
        if len(epochs) < (1 if whole else _ENOUGH):
            lines = _uninterrupted(_decoded(blocks, (_START, _RESUME, _STEP)))
            drawn = [*{line.step: line for line in lines if line.event == "step"}.values()] or drawn
        self.losses = tuple(math.nan if line.loss is None else line.loss for line in drawn)
        """Training losses of epochs, or of steps if there are too few epochs."""


def validations(file: Path) -> list[dict[str, Any]]:
    """Return the evaluations of the validation set; none for a large file."""
    found: list[dict[str, Any]] = []
    if file.stat().st_size > _WHOLE_BYTES:
        return found
    for text in _starting_with(_read(file)[1], _EVALUATION):
        with contextlib.suppress(ValueError, RecursionError):
            found.append(json.loads(text))
    return [one for one in found if one.get("split") == "validation"]


@contextlib.contextmanager
def open_regular(file: Path) -> Iterator[int]:
    """Open a regular file to read; to open a FIFO would wait."""
    descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a file", str(file))
        yield descriptor
    finally:
        os.close(descriptor)


def _read(file: Path) -> tuple[int, list[list[bytes]]]:
    """Return a file's size, and the whole lines of each block of it."""
    with open_regular(file) as descriptor:
        size = os.fstat(descriptor).st_size
        places = [(0, size)]
        if size > _WHOLE_BYTES:
            room = (size - 2 * _END_BYTES) / _BLOCKS
            between = [_END_BYTES + int(room * (n + 0.5)) for n in range(_BLOCKS)]
            places = [(at, _BLOCK_BYTES) for at in between]
            places = [(0, _END_BYTES), *places, (size - _END_BYTES, _END_BYTES)]
        blocks = []
        for at, length in places:
            os.lseek(descriptor, at, os.SEEK_SET)
            # What stands before the first newline began elsewhere; what follows the last is torn.
            blocks.append(os.read(descriptor, length).split(b"\n")[bool(at) : -1])
    return size, blocks


def _starting_with(blocks: list[list[bytes]], prefix: bytes | tuple[bytes, ...]) -> list[bytes]:
    return [text for lines in blocks for text in lines if text.startswith(prefix)]


def _decoded(blocks: list[list[bytes]], prefix: bytes | tuple[bytes, ...]) -> Iterator[Line]:
    found = (_line(text) for text in _starting_with(blocks, prefix))
    return (line for line in found if line is not None)


def _line(text: bytes) -> Line | None:
    """Return the record of a line; None if it is damaged."""
    damaged = contextlib.suppress(ValueError, RecursionError, msgspec.MsgspecError)
    with damaged:
        return _DECODER.decode(text)
    with damaged:  # earlier versions wrote NaN and Infinity, which are not JSON
        return msgspec.convert(json.loads(text), Line)
    return None


def _uninterrupted(lines: Iterable[Line]) -> list[Line]:
    """Leave out what a later attempt has superseded, as `as_uninterrupted` does."""
    kept: list[Line] = []
    for line in lines:
        if line.event == "start" and not line.resumed:
            kept = []
        if line.event == "resume" and line.step is not None:
            kept = [one for one in kept if one.step is None or one.step <= line.step]
        kept.append(line)
    return kept


def read_runs(folder: Path | str = "runs") -> list[RunSummary]:
    """Return what is known of each run in a folder, the newest first.

    Runs are also found in folders of it that are not runs themselves. Hidden entries are left out,
    and so are files like notes.txt and folders without a run.
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
            path.stat()  # a link that leads nowhere, or to itself, raises here
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
    """Return a run in short; None for what `samestep profile` wrote, which is not a training."""
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
    written = None
    with contextlib.suppress(OSError):
        written = path.stat().st_mtime
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
        started=_seconds(start.time, written),
        losses=seen.losses,
    )


def _glimpse(file: Path, damage: list[str]) -> _Glimpse:
    """Return what the records say; nothing for a run that has not begun."""
    try:
        seen = _Glimpse(*_read(file))
    except FileNotFoundError:
        if (file.parent / "checkpoints").is_dir() and (file.parent / "result.json").exists():
            damage.append("events.jsonl is missing")
        return _Glimpse(0, [[]])
    except OSError as error:
        damage.append(f"events.jsonl cannot be read: {error.strerror}")
        return _Glimpse(0, [[]])
    if seen.start is None and seen.size:
        damage.append("events.jsonl has no start record")
    elif seen.latest and seen.latest.format > RUN_FORMAT:
        damage.append(f"its run format {seen.latest.format} is newer than this samestep")
    return seen


def _object(file: Path, damage: list[str]) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if there is none."""
    try:
        # Earlier versions wrote NaN and Infinity, which are not JSON.
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
    """Return what is in a small file."""
    with open_regular(file) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > _MOST_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(file))
        return os.read(descriptor, size)


def _best(
    path: Path, seen: _Glimpse, result: Mapping[str, Any], damage: list[str]
) -> tuple[str | None, Literal["min", "max"] | None, float | None]:
    """Return the monitored metric, its direction and its best: of the result, else so far."""
    start = seen.latest or Line("")
    best, index = result.get("best"), {}
    table: dict[str, Any] = best if isinstance(best, dict) else {}
    if _number(table.get("value")) is None or "mode" not in table:
        index = _object(path / "checkpoints" / "index.json", damage)
    ranks = isinstance(index.get("best"), dict)
    metric = table.get("metric") or start.monitor or (index.get("monitor") if ranks else None)
    if not isinstance(metric, str):  # a loop of one's own that monitors nothing
        if (best_accuracy := _evaluated(path, "accuracy", "max")) is not None:
            return "accuracy", "max", best_accuracy
        least_loss = _evaluated(path, "loss", "min")
        return (None, None, None) if least_loss is None else ("loss", "min", least_loss)
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


def _evaluated(path: Path, metric: str, mode: Literal["min", "max"]) -> float | None:
    """Return the best recorded value of a metric on the validation set."""
    try:
        found = [_number(record.get(metric)) for record in validations(path / "events.jsonl")]
    except OSError:
        return None
    pick = min if mode == "min" else max
    return pick((value for value in found if value is not None), default=None)


def _recipe(path: Path, told: object, damage: list[str]) -> str:
    """Return the recipe's name; before the run begins, from its settings."""
    if not told and (path / "settings.toml").is_file():
        try:
            told = tomllib.loads(_content(path / "settings.toml").decode()).get("recipe")
        except (OSError, ValueError, RecursionError):
            damage.append("settings.toml is damaged")
    return Path(told).stem if isinstance(told, str) else ""


def _number(value: object) -> float | None:
    """Return a finite number; None for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e300 else None  # type: ignore[arg-type]


def _seconds(*values: object) -> float | None:
    """Return the first value that is a plausible time."""
    numbers = (_number(value) for value in values)
    return next((n for n in numbers if n is not None and 0 <= n < _MOST_SECONDS), None)


def _whole(*values: object) -> int | None:
    """Return the first value that is an integer."""
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool)), None)
