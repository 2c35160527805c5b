"""The index of a run's checkpoints, with their hashes and the best one.

A checkpoint counts from the moment the index names it. Whatever kills the process before that
leaves the index, and every file it names, as they were.
"""

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from samestep.base.errors import UserError
from samestep.base.run.files import sha256_of, write_text

_OURS = re.compile(r"checkpoint_(epoch|step)_\d+(_again)?\.(pt|shards)")  # a user's own copies stay


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One checkpoint in the index."""

    path: str
    """File name in checkpoints/."""
    step: int
    epoch: int
    sha256: str
    metric: float | None = None
    """The monitored metric at this step, if it was evaluated there."""
    files: dict[str, str] = field(default_factory=dict)
    """Of a sharded checkpoint: the SHA-256 of each part, by its place in checkpoints/."""
    time: float | None = None
    """When it was announced, in seconds since the epoch, if that is known."""


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which checkpoints stay: all that any rule keeps, the last, and by any rule at least the best.

    Without a rule all stay.
    """

    top_k: int | None = None
    """The best K."""
    newest: int | None = None
    """The newest N."""
    hours: float | None = None
    """Those that were announced at most this many hours ago."""

    @property
    def keeps_all(self) -> bool:
        """Whether there is no rule."""
        return self.top_k is self.newest is self.hours is None


@dataclass(frozen=True, kw_only=True)
class Index:
    """All checkpoints of a run, oldest first, and which one is the best."""

    checkpoints: tuple[Entry, ...] = ()
    monitor: str = "accuracy"
    mode: str = "max"
    gone: tuple[str, ...] = ()
    """Files deleted after this index was written, unless a kill or a disk prevented it."""

    @property
    def last(self) -> Entry | None:
        """The checkpoint with the most steps."""
        return max(self.checkpoints, key=lambda entry: entry.step, default=None)

    def ranked(self) -> list[Entry]:
        """Return the checkpoints that have the metric, best first; of equals the earlier first."""
        sign = 1 if self.mode == "min" else -1
        scored = [entry for entry in self.checkpoints if entry.metric is not None]
        return sorted(scored, key=lambda entry: (sign * (entry.metric or 0.0), entry.step))

    @property
    def best(self) -> Entry | None:
        """The checkpoint with the best metric."""
        return next(iter(self.ranked()), None)

    def add(self, entry: Entry) -> "Index":
        """Add a checkpoint; it replaces one of the same name or step."""
        others = [e for e in self.checkpoints if e.path != entry.path and e.step != entry.step]
        return replace(self, checkpoints=(*others, entry))

    def up_to(self, step: int) -> "Index":
        """Return the index without the checkpoints of later steps."""
        return replace(self, checkpoints=tuple(e for e in self.checkpoints if e.step <= step))

    def prune(self, rules: Retention, spared: Collection[str] = (), now: float = 0.0) -> "Index":
        """Return the index with what the rules keep at the time `now`, and the spared files.

        A checkpoint of unknown age stays.
        """
        if rules.keeps_all:
            return self
        newest = sorted(self.checkpoints, key=lambda entry: -entry.step)
        keep = {entry.path for entry in newest[: max(rules.newest or 1, 1)]}
        keep |= {entry.path for entry in self.ranked()[: rules.top_k or 1]} | {*spared}
        if rules.hours is not None:
            since = now - rules.hours * 3600
            keep |= {e.path for e in self.checkpoints if e.time is None or e.time >= since}
        return replace(self, checkpoints=tuple(e for e in self.checkpoints if e.path in keep))


def announce(
    folder: Path, index: Index, entry: Entry, rules: Retention, spared: Collection[str] = ()
) -> Index:
    """Name a written checkpoint in the index, then delete those that are no longer kept.

    What cannot be deleted now stays in `gone`, and is tried again after the next checkpoint.
    """
    now = time.time()
    grown = index.add(replace(entry, time=now))
    retained = grown.prune(rules, spared, now)
    gone = {e.path for e in (*index.checkpoints, entry)} - {e.path for e in retained.checkpoints}
    left = {name for name in index.gone if is_left(folder, name)}
    gone |= left - {e.path for e in retained.checkpoints}
    retained = replace(retained, gone=tuple(sorted(gone)))
    write_text(folder / "index.json", index_text(retained))
    for name in retained.gone:
        remove(folder / name)
    return retained


def is_left(folder: Path, name: str) -> bool:
    """Whether a checkpoint file that was deleted is still there."""
    there = os.path.exists(folder / name)  # noqa: PTH110 - Path's raises on a disk that fails
    return there and _OURS.fullmatch(name) is not None


def index_text(index: Index) -> str:
    """Return the text of index.json."""
    table = {"last": index.last, "best": index.best, **vars(index)}
    text = json.dumps(table, default=_as_table)  # its own indentation takes ten times as long
    return msgspec.json.format(text, indent=2) + "\n"


def verify(folder: Path, entry: Entry) -> None:
    """Check the files of a checkpoint against their hashes.

    Raises:
        UserError: a file is missing or damaged.
    """
    path = folder / entry.path
    try:
        now = sha256_of(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    if now != entry.sha256:
        raise UserError(
            f"{path} is damaged: its SHA-256 is {now[:12]}…, the index says {entry.sha256[:12]}…."
        )
    if entry.files:
        from samestep.base.run import shards  # noqa: PLC0415 - torch, only for sharded checkpoints

        parts = {Path(place).name: digest for place, digest in entry.files.items()}
        shards.verify(folder / shards_of(entry.path), parts)


def _as_table(entry: Entry) -> dict[str, Any]:
    optional = ("files", "time")
    return {k: v for k, v in vars(entry).items() if k not in optional or v not in (None, {})}


def shards_of(name: str) -> str:
    """Return the name of the folder with the parts of a sharded checkpoint."""
    return Path(name).with_suffix(".shards").name


def remove(file: Path) -> None:
    """Delete a checkpoint file and the parts that belong to it, if the disk allows it."""
    with contextlib.suppress(OSError):  # no reason to end a training
        file.unlink(missing_ok=True)
    shutil.rmtree(file.with_suffix(".shards"), ignore_errors=True)


def remove_unannounced(folder: Path, announced: Collection[str], since: float) -> None:
    """Delete what a kill has left: checkpoints that were not announced yet, or not kept any more.

    Only files of our own names, written since the run began and never announced, so that what
    somebody put there, or what an old index does not know, stays.
    """
    index = read_index(folder)
    known = {entry.path for entry in index.checkpoints}
    for name in {*index.gone} - known:
        if _OURS.fullmatch(name):
            remove(folder / name)
    named = {*announced, *known}
    for place in [*folder.glob("checkpoint_*.pt"), *folder.glob("checkpoint_*.shards")]:
        file = place.with_suffix(".pt")
        is_checkpoint = _OURS.fullmatch(place.name) and file.name not in named
        # A file and its parts go together, so the second may be gone.
        if is_checkpoint and place.exists() and place.stat().st_mtime >= since:
            remove(file)


def read_index(folder: Path) -> Index:
    """Return the index of a run's checkpoints; empty if there is none yet."""
    path = folder / "index.json"
    try:
        return parse_index(path.read_bytes(), path)
    except FileNotFoundError:
        return Index()


def parse_index(text: bytes, path: object) -> Index:
    """Return the index that a file says; `path` is what a message calls it."""
    try:
        table = json.loads(text, parse_constant=lambda _: None)  # NaN is not JSON
        index = msgspec.convert(table, Index)
        if not all(map(_is_inside, index.checkpoints)):
            raise msgspec.ValidationError("it names a file outside the folder")
        return index  # noqa: TRY300 - the checks belong together
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path} is damaged ({error}). It lists the checkpoints; `samestep train RUN --resume` "
            "rewrites it unless the run is sharded."
        ) from error


def _is_inside(entry: Entry) -> bool:
    parts = [Path(place) for place in entry.files]
    folder = shards_of(entry.path)
    named = Path(entry.path).name == entry.path
    return named and all(place == Path(folder, place.name) for place in parts)


def find_checkpoint(folder: Path, name: str) -> Entry:
    """Return the entry of the best, the last, or a named checkpoint."""
    index = read_index(folder)
    if name == "last" and index.last:
        return index.last
    # Without a validation set the last is all there is.
    if name == "best" and (best := index.best or index.last):
        return best
    for entry in index.checkpoints:
        if entry.path in (name, f"{name}.pt"):
            return entry
    paths = ", ".join(entry.path for entry in index.checkpoints) or "none yet"
    raise UserError(f"{folder} has no checkpoint {name!r}. It has: best, last, {paths}.")
