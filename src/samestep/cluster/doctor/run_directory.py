"""The run directory: can it be written, is there space, do all ranks see the same one."""

import secrets
import shutil
import stat
import tempfile
import time
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

from samestep.base.errors import UserError
from samestep.base.run.directory import is_run
from samestep.base.run.files import write_text
from samestep.base.run.records import read_records, samples_per_step
from samestep.base.words import size
from samestep.cluster.doctor.findings import Check, Finding, graded, green, red
from samestep.cluster.doctor.rank_facts import Allocation, Folder, call_within, value_within
from samestep.launch.ranks.world import World

PREFIX = ".samestep-doctor-"  # prefix of every file that the doctor writes and removes again
_ANSWER_S = 15.0  # a file system that takes longer has lost its server
ESTIMATED_CHECKPOINT_BYTES = 1_200_000_000
"""Assumed without a run: 100 million parameters, with Adam's moments 12 bytes each."""
FEW_CHECKPOINTS = 3  # assumed without a run: the last, the best, and the one being written
FULL_BYTES = 64 << 20  # a disk with less is full for any run
NFS_WAIT_S = 5.0
"""NFS may cache for some seconds that a file did not exist (acregmin, acdirmin: man 5 nfs)."""
_POLL_EVERY_S = 0.2
_MARGIN_S = 1.0


def read_folder(path: Path) -> Folder:
    """Read the facts of a run directory."""
    path = path.absolute()

    def read() -> Folder:
        base = _existing(path)
        problem = _try_to_write(path, base)
        run = _read_run(path) if is_run(path) else {}
        free_bytes = shutil.disk_usage(base).free
        return Folder(path=str(path), problem=problem, free_bytes=free_bytes, **run)

    try:
        return call_within(_ANSWER_S, read)
    except OSError as error:  # including a timeout
        return Folder(path=str(path), problem=error.strerror or str(error))


def _existing(path: Path) -> Path:
    """Return a folder, or its nearest parent that exists."""
    for place in (path, *path.parents):
        # Not `is_dir`, which differs between versions of Python if access is denied.
        with suppress(FileNotFoundError, NotADirectoryError):
            if stat.S_ISDIR(place.stat().st_mode):
                return place
    raise FileNotFoundError(path)


def _try_to_write(path: Path, base: Path) -> str:
    """Replace a file by a rename, as checkpoints are; return what went wrong."""
    if blocked := [p for p in (path, *path.parents) if p.exists() and not p.is_dir()]:
        return f"{blocked[0]} is a file, not a folder"
    try:
        with tempfile.TemporaryDirectory(prefix=PREFIX, dir=base) as folder:
            file = Path(folder) / "file"
            for text in ("old", "new"):
                write_text(file, text)
            return "" if file.read_text() == "new" else "a renamed file still has its old content"
    except UserError as error:
        return str(error.__cause__ or error)
    except OSError as error:
        return error.strerror or str(error)


def _read_run(path: Path) -> dict[str, Any]:
    """Read a run's loader workers, checkpoints and time per epoch; nothing of a damaged run."""
    try:
        settings = tomllib.loads((path / "settings.toml").read_text())
        epoch_s, samples_per_epoch = None, 0
        for record in read_records(path):
            if record["event"] == "start":
                steps = record.get("steps_per_epoch")  # without those that --drop-last leaves out
                samples_per_epoch = samples_per_step(record) * steps if steps else 0
            elif record["event"] == "epoch":  # of one that was stopped, only a part is trained
                part = min(1.0, record["samples"] / samples_per_epoch) if samples_per_epoch else 1.0
                epoch_s = record["train_seconds"] / part if part else epoch_s
        files = [f.stat() for f in (path / "checkpoints").glob("*.pt")]
    except (OSError, UserError, ValueError, KeyError):
        return {}
    facts = {"num_workers": settings.get("num_workers", 0), "epoch_s": epoch_s}
    if files:
        facts["checkpoint_bytes"] = max(files, key=lambda file: file.st_mtime).st_size
    if "keep_hours" not in settings and ({"keep_top_k", "keep_newest"} & settings.keys()):
        # The newest, or only the last one, and the next.
        num_kept = settings.get("keep_top_k", 1) + settings.get("keep_newest", 1)
        facts["num_checkpoints"] = num_kept + 1
    elif "epochs" in settings:
        every = settings.get("checkpoint_every_epochs", 1)
        facts["num_checkpoints"] = -(-settings["epochs"] // every)
    return facts


def run_directory(folder: Folder) -> Finding:
    """Check that a file can be written as checkpoints are: to another name, then renamed."""
    if folder.problem:
        advice = "Correct its permissions, or choose another place with --run-dir."
        return red(f"{folder.path}: {folder.problem}", advice)
    return green(f"{folder.path} can be written, renaming is atomic")


def free_space(folder: Folder) -> Finding | None:
    """Check that there is room for the checkpoints that the run will keep."""
    if folder.free_bytes is None:
        return None
    each = folder.checkpoint_bytes or ESTIMATED_CHECKPOINT_BYTES
    count = folder.num_checkpoints or FEW_CHECKPOINTS
    measured = "measured" if folder.checkpoint_bytes else "estimated without --run-dir RUN"
    needed = f"{count} checkpoints of {size(each)} ({measured}) take {size(count * each)}"
    return graded(
        f"{size(folder.free_bytes)} free; {needed}",
        "Free some space, keep fewer (--keep-top-k 2), or choose another --run-dir.",
        # A checkpoint is written before the one that it replaces is deleted.
        red_if=folder.free_bytes < max(FULL_BYTES, 2 * (folder.checkpoint_bytes or 0)),
        yellow_if=folder.free_bytes < count * each,
    )


CHECKS: list[Check[Folder]] = [run_directory, free_space]


def find_shared_file(world: World, run_dir: Path, wait_s: float) -> tuple[str, ...] | None:
    """Return why each rank cannot see a file of rank 0's; None if rank 0 could not write one."""
    path = run_dir.absolute()
    # Each access is bounded: a file system that has lost its server never answers.
    written = value_within(wait_s, lambda: _write_token(path), None) if world.is_main else None
    if (written := world.broadcast(written)) is None:
        return None
    token, levels = written
    places = (path, *path.parents)
    file = places[min(levels, len(places) - 1)] / f"{PREFIX}{token}"
    try:
        silent = "gets no response from its file system"
        seen = value_within(
            wait_s + _MARGIN_S, lambda: _wait_for_token(file, token, wait_s), silent
        )
        return tuple(world.gather(seen))
    finally:
        if world.is_main:
            value_within(wait_s, lambda: file.unlink(missing_ok=True), None)


def _write_token(path: Path) -> tuple[str, int]:
    """Write a token into a file; return it, and how many folders above the path the file is."""
    token = secrets.token_hex(8)
    base = _existing(path)
    file = base / f"{PREFIX}{token}"
    try:
        file.write_text(token)
    except OSError:
        file.unlink(missing_ok=True)  # a full disk leaves an empty file
        raise
    return token, len(path.parts) - len(base.parts)


def _wait_for_token(file: Path, token: str, wait_s: float) -> str:
    """Poll for the file until the deadline; return why this rank does not see it."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            next(file.parent.iterdir(), None)  # makes an NFS client ask its server again
            if file.read_text() == token:
                return ""
            problem = "reads only part of it"
        except FileNotFoundError:
            problem = "does not see it"
        except OSError as error:
            problem = f"cannot read it ({error.strerror})"
        if time.monotonic() > deadline:
            return problem
        time.sleep(_POLL_EVERY_S)


def shared_folder(allocation: Allocation) -> Finding | None:
    """Check that all ranks see the same run directory."""
    if allocation.measured is None or allocation.measured.unshared is None:
        return None
    if not (blind := [(n, why) for n, why in enumerate(allocation.measured.unshared) if why]):
        return green("all ranks see the same")
    rank, why = blind[0]
    folder = allocation.ranks[0].folder
    assert folder is not None, "rank 0 is the first of its node"
    more = f" ({len(blind)} ranks in all)" if len(blind) > 1 else ""
    return red(
        f"rank 0 wrote a file for {folder.path}; {allocation.ranks[rank].label} {why}{more}",
        "Pass --run-dir an absolute path on a file system that all nodes share.",
        hosts=tuple({allocation.ranks[n].machine.host: None for n, _ in blind}),
    )
