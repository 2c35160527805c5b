"""The run directory as one node sees it: can it be written, is there space, what a run told."""

import shutil
import stat
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.doctor.bounded import call_within
from samestep.errors import UserError
from samestep.run.directory import is_run
from samestep.run.files import write_text
from samestep.run.records import read_records

PREFIX = ".samestep-doctor-"
"""Begins the name of everything that the doctor writes, and removes again."""
_ANSWER_S = 15.0
"""A file system that has not answered by then is one whose server is gone."""


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A run directory, or the folder in which it will be made."""

    path: str
    """As it was asked for, made absolute."""
    problem: str = ""
    """Why a file cannot be written there; empty if it can."""
    free_bytes: int | None = None
    """None if the file system does not tell."""
    checkpoint_bytes: int | None = None
    """Size of the newest checkpoint, if this is a run that has one."""
    num_checkpoints: int | None = None
    """How many the run will keep, the one being written counted in; None if not known."""
    num_workers: int = 0
    """Loader workers per rank that the run's settings ask for."""
    epoch_s: float | None = None
    """Seconds of training in the run's newest whole epoch."""


def read_folder(path: Path) -> Folder:
    """Read the facts of a run directory; what is written for that is removed again."""
    path = path.absolute()
    try:
        return call_within(_ANSWER_S, lambda: _read(path))
    except OSError as error:  # also if it takes too long
        return Folder(path=str(path), problem=error.strerror or str(error))


def existing(path: Path) -> Path:
    """Return a folder, or the nearest one above it that exists.

    Raises:
        OSError: this user may not look there.
    """
    return next(place for place in (path, *path.parents) if _is_folder(place))


def _is_folder(path: Path) -> bool:
    try:  # `is_dir` differs between versions of Python where this user may not look
        return stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _read(path: Path) -> Folder:
    base = existing(path)
    problem = _try_to_write(path, base)
    run = _read_run(path) if is_run(path) else {}
    free_bytes = shutil.disk_usage(base).free
    return Folder(path=str(path), problem=problem, free_bytes=free_bytes, **run)


def _try_to_write(path: Path, base: Path) -> str:
    """Write a file over another one by a rename, as checkpoints are; say what went wrong."""
    blocked = next((p for p in (path, *path.parents) if p.exists() and not p.is_dir()), None)
    if blocked is not None:
        return f"{blocked} is a file, not a folder"
    try:
        with tempfile.TemporaryDirectory(prefix=PREFIX, dir=base) as folder:
            file = Path(folder) / "file"
            for text in ("old", "new"):
                write_text(file, text)
            if file.read_text() != "new":
                return "a renamed file keeps its old content"
    except UserError as error:
        return str(error.__cause__ or error)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _read_run(path: Path) -> dict[str, Any]:
    """Read what a run tells: its settings, its checkpoints, the time of an epoch."""
    try:
        settings = tomllib.loads((path / "settings.toml").read_text())
        seconds = [r["train_seconds"] for r in read_records(path) if r["event"] == "epoch"]
        files = [f.stat() for f in (path / "checkpoints").glob("*.pt")]
    except (OSError, UserError, ValueError, KeyError):
        return {}  # a damaged run is told of by whoever resumes it; one that runs may be changing
    facts: dict[str, Any] = {
        "num_workers": settings.get("num_workers", 0),
        "epoch_s": seconds[-1] if seconds else None,
    }
    if files:
        facts["checkpoint_bytes"] = max(files, key=lambda file: file.st_mtime).st_size
    if "keep_top_k" in settings:
        facts["num_checkpoints"] = settings["keep_top_k"] + 2  # the last one, and the next
    elif "epochs" in settings:
        every = settings.get("checkpoint_every_epochs", 1)
        facts["num_checkpoints"] = -(-settings["epochs"] // every)
    return facts
