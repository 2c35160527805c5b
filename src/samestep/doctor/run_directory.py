"""The run directory as one node sees it: can it be written, is there space, what a run told."""

import shutil
import stat
import tempfile
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

from samestep.doctor.facts import Folder
from samestep.doctor.findings import Check, Finding, graded, green, red
from samestep.doctor.timeouts import call_within
from samestep.errors import UserError
from samestep.run.directory import is_run
from samestep.run.files import write_text
from samestep.run.records import read_records

PREFIX = ".samestep-doctor-"
"""Begins the name of everything that the doctor writes, and removes again."""
_ANSWER_S = 15.0  # a file system that has not answered by then is one whose server is gone
ESTIMATED_CHECKPOINT_BYTES = 1_200_000_000
"""Where no run tells: 100 million parameters, in fp32 with Adam's two moments 12 bytes each."""
FEW_CHECKPOINTS = 3
"""Where it is not known how many are kept: the last, the best, and the one being written."""
FULL_BYTES = 64 << 20  # less than this is a full disk for any run


def read_folder(path: Path) -> Folder:
    """Read the facts of a run directory; what is written for that is removed again."""
    path = path.absolute()

    def read() -> Folder:
        base = existing(path)
        problem = _try_to_write(path, base)
        run = _read_run(path) if is_run(path) else {}
        free_bytes = shutil.disk_usage(base).free
        return Folder(path=str(path), problem=problem, free_bytes=free_bytes, **run)

    try:
        return call_within(_ANSWER_S, read)
    except OSError as error:  # also if it takes too long
        return Folder(path=str(path), problem=error.strerror or str(error))


def existing(path: Path) -> Path:
    """Return a folder, or the nearest one above it that exists.

    Raises:
        OSError: this user may not look there.
    """
    for place in (path, *path.parents):
        # `is_dir` differs between versions of Python where this user may not look
        with suppress(FileNotFoundError, NotADirectoryError):
            if stat.S_ISDIR(place.stat().st_mode):
                return place
    raise FileNotFoundError(path)


def _try_to_write(path: Path, base: Path) -> str:
    """Write a file over another one by a rename, as checkpoints are; say what went wrong."""
    if blocked := [p for p in (path, *path.parents) if p.exists() and not p.is_dir()]:
        return f"{blocked[0]} is a file, not a folder"
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
    facts = {"num_workers": settings.get("num_workers", 0), "epoch_s": [None, *seconds][-1]}
    if files:
        facts["checkpoint_bytes"] = max(files, key=lambda file: file.st_mtime).st_size
    if "keep_top_k" in settings:
        facts["num_checkpoints"] = settings["keep_top_k"] + 2  # the last one, and the next
    elif "epochs" in settings:
        every = settings.get("checkpoint_every_epochs", 1)
        facts["num_checkpoints"] = -(-settings["epochs"] // every)
    return facts


def run_directory(folder: Folder) -> Finding:
    """Whether a file can be written there whole: under another name, synced, then renamed."""
    if folder.problem:
        advice = "Correct its permissions, or choose another place with --run-dir."
        return red(f"{folder.path}: {folder.problem}", advice)
    return green(f"{folder.path} can be written, renaming is atomic")


def free_space(folder: Folder) -> Finding | None:
    """Whether the checkpoints that the run will keep have room."""
    if folder.free_bytes is None:
        return None
    one = folder.checkpoint_bytes or ESTIMATED_CHECKPOINT_BYTES
    count = folder.num_checkpoints or FEW_CHECKPOINTS
    measured = "measured" if folder.checkpoint_bytes else "estimated: no run was named"
    take = f"{count} checkpoints of {_gb(one)} ({measured}) take {_gb(count * one)}"
    return graded(
        f"{_gb(folder.free_bytes)} free; {take}",
        "Free some space, keep fewer (--keep-top-k 2), or choose another --run-dir.",
        # A checkpoint is written beside the one that it replaces.
        red_if=folder.free_bytes < max(FULL_BYTES, 2 * (folder.checkpoint_bytes or 0)),
        yellow_if=folder.free_bytes < count * one,
    )


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"


CHECKS: list[Check[Folder]] = [run_directory, free_space]
