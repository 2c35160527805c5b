"""The run directory as one node sees it: can it be written, is there space, what a run told."""

import json
import shutil
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.errors import UserError
from samestep.files import write_text
from samestep.run import is_run, read_records

PREFIX = ".samestep-doctor-"
"""Begins the name of everything that the doctor writes, and removes again."""


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A run directory, or the folder in which it will be made."""

    path: str
    """As it was asked for, made absolute."""
    base: str
    """It, or the nearest folder above that exists: what was tried."""
    problem: str = ""
    """Why a file cannot be written there; empty if it can."""
    free_bytes: int = 0
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
    base = existing(path)
    problem = _try_to_write(path, base)
    run = _read_run(path) if is_run(path) else {}
    return Folder(
        path=str(path),
        base=str(base),
        problem=problem,
        free_bytes=shutil.disk_usage(base).free,
        **run,
    )


def existing(path: Path) -> Path:
    """Return a folder, or the nearest one above it that exists."""
    return next(place for place in (path, *path.parents) if place.is_dir())


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
    facts: dict[str, Any] = {}
    try:
        settings = tomllib.loads((path / "settings.toml").read_text())
        seconds = [r["train_seconds"] for r in read_records(path) if r["event"] == "epoch"]
    except (OSError, UserError, ValueError, KeyError, json.JSONDecodeError):
        return {}  # a damaged run is told of by whoever resumes it
    facts["num_workers"] = int(settings.get("num_workers", 0))
    facts["epoch_s"] = seconds[-1] if seconds else None
    files = [f.stat() for f in (path / "checkpoints").glob("*.pt")]
    if files:
        facts["checkpoint_bytes"] = max(files, key=lambda stat: stat.st_mtime).st_size
    if "keep_top_k" in settings:
        facts["num_checkpoints"] = settings["keep_top_k"] + 2  # the last one, and the next
    elif "epochs" in settings:
        every = settings.get("checkpoint_every_epochs", 1)
        facts["num_checkpoints"] = -(-settings["epochs"] // every)
    return facts
