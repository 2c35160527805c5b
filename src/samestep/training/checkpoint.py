"""Checkpoints: written whole or not at all, named in an index with their hash, verified on load.

A checkpoint counts from the moment the index names it. Whatever kills the process before that
leaves the index, and every file it names, as they were.
"""

import hashlib
import io
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec
import torch

from samestep.errors import UserError
from samestep.files import write_atomically, write_text

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One checkpoint as the index knows it."""

    path: str
    """File name in checkpoints/."""
    step: int
    epoch: int
    sha256: str
    metric: float | None = None
    """The monitored metric at this step, if it was evaluated there."""


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
        """Return the index with one more checkpoint; one of the same name or step is replaced."""
        others = [e for e in self.checkpoints if e.path != entry.path and e.step != entry.step]
        return replace(self, checkpoints=(*others, entry))

    def up_to(self, step: int) -> "Index":
        """Return the index without the checkpoints of later steps."""
        return replace(self, checkpoints=tuple(e for e in self.checkpoints if e.step <= step))

    def prune(self, keep_top_k: int | None) -> "Index":
        """Return the index with only the best k and the last."""
        if keep_top_k is None:
            return self
        keep = {entry.path for entry in self.ranked()[:keep_top_k]}
        if self.last:
            keep.add(self.last.path)
        return replace(self, checkpoints=tuple(e for e in self.checkpoints if e.path in keep))


class _HashingWriter(io.RawIOBase):
    """Pass bytes on and hash them; keep the error that torch's own writer would hide."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._hash = file, hashlib.sha256()
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        self._hash.update(data)
        return len(data)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def save(folder: Path, name: str, state: dict[str, Any]) -> str:
    """Write a checkpoint file and return its SHA-256; it is not announced yet.

    Raises:
        UserError: it could not be written; nothing is left behind.
    """
    digest = ""

    def write(file: BinaryIO) -> None:
        nonlocal digest
        writer = _HashingWriter(file)
        try:
            torch.save(state, cast("BinaryIO", writer))
        except Exception:
            if writer.error is not None:
                raise writer.error from None
            raise
        digest = writer.hexdigest()

    write_atomically(folder / name, write)
    return digest


def announce(folder: Path, index: Index, entry: Entry, keep_top_k: int | None) -> Index:
    """Name a written checkpoint in the index, then delete those that are no longer kept."""
    grown = index.add(entry)
    kept = grown.prune(keep_top_k)
    write_text(folder / "index.json", _to_json(kept))
    for gone in {e.path for e in (*index.checkpoints, entry)} - {e.path for e in kept.checkpoints}:
        (folder / gone).unlink(missing_ok=True)
    return kept


def read_index(folder: Path) -> Index:
    """Return the index of a run's checkpoints; empty if there is none yet.

    Raises:
        UserError: the file is there but is no index.
    """
    path = folder / "index.json"
    try:
        index = msgspec.json.decode(path.read_bytes(), type=Index)
        if any(Path(entry.path).name != entry.path for entry in index.checkpoints):
            raise msgspec.ValidationError("it names a file outside of the folder")
        return index  # noqa: TRY300 - the checks belong together
    except FileNotFoundError:
        return Index()
    except msgspec.MsgspecError as error:
        raise UserError(
            f"{path} is damaged ({error}). It names the checkpoints beside it; restore it from a "
            "backup, or start a new run."
        ) from error


def _to_json(index: Index) -> str:
    table = {
        "last": asdict(index.last) if index.last else None,
        "best": asdict(index.best) if index.best else None,
        "monitor": index.monitor,
        "mode": index.mode,
        "checkpoints": [asdict(entry) for entry in index.checkpoints],
    }
    return json.dumps(table, indent=2) + "\n"


def load(folder: Path, entry: Entry) -> dict[str, Any]:
    """Return a checkpoint's content, on the CPU, after checking its hash.

    Raises:
        UserError: the file is missing, differs from what was written, or is no checkpoint.
    """
    path = folder / entry.path
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    found = hashlib.sha256(content).hexdigest()
    if found != entry.sha256:
        raise UserError(
            f"{path} is damaged: its SHA-256 is {found[:12]}…, the index says {entry.sha256[:12]}…."
        )
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # what it raises depends on what stands in the file
        raise UserError(f"{path} is no checkpoint that can be loaded safely: {error}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise UserError(f"{path} is no checkpoint of this version of samestep.")
    return state


def load_newest(folder: Path) -> tuple[Entry, dict[str, Any], list[str]] | None:
    """Return the newest checkpoint that verifies, and what was wrong with newer ones.

    Returns:
        Its entry, its content, and a message for each newer one that had to be passed over; None
        where no checkpoint was ever announced.

    Raises:
        UserError: checkpoints were announced, and not one of them verifies.
    """
    entries = sorted(read_index(folder).checkpoints, key=lambda entry: -entry.step)
    problems: list[str] = []
    for entry in entries:
        try:
            return entry, load(folder, entry), problems
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("No checkpoint of this run is whole. " + " ".join(problems))
    return None
