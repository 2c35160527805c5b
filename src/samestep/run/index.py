"""The index of a run's checkpoints, with their hashes and the best one.

A checkpoint counts from the moment the index names it. Whatever kills the process before that
leaves the index, and every file it names, as they were.
"""

import json
import re
import shutil
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from samestep.errors import UserError
from samestep.run.files import write_text

_OURS = re.compile(r"checkpoint_(epoch|step)_\d+\.(pt|shards)")  # a user's own copies stay


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


@dataclass(frozen=True, kw_only=True)
class Index:
    """All checkpoints of a run, oldest first, and which one is the best."""

    checkpoints: tuple[Entry, ...] = ()
    monitor: str = "accuracy"
    mode: str = "max"

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

    def prune(self, keep_top_k: int | None, spared: Collection[str] = ()) -> "Index":
        """Return the index with the best k, the last, and the spared files."""
        if keep_top_k is None:
            return self
        keep = {entry.path for entry in (*self.ranked()[:keep_top_k], self.last) if entry}
        keep |= {*spared}
        return replace(self, checkpoints=tuple(e for e in self.checkpoints if e.path in keep))


def announce(
    folder: Path, index: Index, entry: Entry, keep_top_k: int | None, spared: Collection[str] = ()
) -> Index:
    """Name a written checkpoint in the index, then delete those that are no longer kept."""
    kept = index.add(entry).prune(keep_top_k, spared)
    table: dict[str, object] = {"last": kept.last, "best": kept.best}
    table |= {"monitor": kept.monitor, "mode": kept.mode, "checkpoints": kept.checkpoints}
    write_text(folder / "index.json", json.dumps(table, indent=2, default=_as_table) + "\n")
    for gone in {e.path for e in (*index.checkpoints, entry)} - {e.path for e in kept.checkpoints}:
        _remove(folder / gone)
    return kept


def _as_table(entry: Entry) -> dict[str, Any]:
    table = asdict(entry)
    return table if entry.files else {name: table[name] for name in table if name != "files"}


def shards_of(name: str) -> str:
    """Return the name of the folder with the parts of a sharded checkpoint."""
    return Path(name).with_suffix(".shards").name


def _remove(file: Path) -> None:
    file.unlink(missing_ok=True)
    shutil.rmtree(file.with_suffix(".shards"), ignore_errors=True)


def remove_unannounced(folder: Path, announced: Collection[str], since: float) -> None:
    """Delete checkpoints that were written but not announced before this run was killed.

    Only files of our own names, written since the run began and never announced, so that what
    somebody put there, or what an old index does not know, stays.
    """
    named = {*announced, *(entry.path for entry in read_index(folder).checkpoints)}
    for file in [*folder.glob("checkpoint_*.pt"), *folder.glob("checkpoint_*.shards")]:
        ours = _OURS.fullmatch(file.name) and file.with_suffix(".pt").name not in named
        if ours and file.stat().st_mtime >= since:
            _remove(file.with_suffix(".pt"))


def read_index(folder: Path) -> Index:
    """Return the index of a run's checkpoints; empty if there is none yet."""
    path = folder / "index.json"
    try:
        # Earlier versions wrote NaN and Infinity, which are no JSON, for a metric that was neither.
        table = json.loads(path.read_bytes(), parse_constant=lambda _: None)
        index = msgspec.convert(table, Index)
        if not all(map(_is_inside, index.checkpoints)):
            raise msgspec.ValidationError("it names a file outside of the folder")
        return index  # noqa: TRY300 - the checks belong together
    except FileNotFoundError:
        return Index()
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path} is damaged ({error}). It names the checkpoints beside it; restore it from a "
            "backup, or start a new run."
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
    known = ", ".join(entry.path for entry in index.checkpoints) or "none yet"
    raise UserError(f"{folder} has no checkpoint {name!r}. It has: best, last, {known}.")


def best_file(folder: Path) -> Path:
    """Return the file of the best checkpoint, or of the last; the folder if there is none."""
    index = read_index(folder)
    entry = index.best or index.last
    return folder / entry.path if entry else folder
