"""Whether the run directory is one and the same place for all ranks."""

import secrets
import time
from pathlib import Path

from samestep.doctor.facts import Allocation
from samestep.doctor.findings import Finding, green, red
from samestep.doctor.run_directory import PREFIX, existing
from samestep.doctor.timeouts import value_within
from samestep.ranks.world import World

NFS_WAIT_S = 5.0
"""NFS may remember for some seconds that a file was not there (acregmin, acdirmin: man 5 nfs)."""
_LOOK_EVERY_S = 0.2
_MARGIN_S = 1.0


def look_for_token(world: World, run_dir: Path, wait_s: float) -> tuple[str, ...] | None:
    """Let rank 0 write a file, and every rank look for it.

    Returns:
        Of each rank, why it does not see the file, or nothing if it does; None if rank 0 could
        not write it.
    """
    path = run_dir.absolute()
    # Each is bounded: a file system whose server is gone answers never.
    written = value_within(wait_s, lambda: _write(path), None) if world.is_main else None
    if (written := world.broadcast(written)) is None:
        return None
    token, levels = written
    places = (path, *path.parents)
    file = places[min(levels, len(places) - 1)] / f"{PREFIX}{token}"
    try:
        silent = "gets no answer from its file system"
        seen = value_within(wait_s + _MARGIN_S, lambda: _look(file, token, wait_s), silent)
        return tuple(world.gather(seen))
    finally:
        if world.is_main:
            value_within(wait_s, lambda: file.unlink(missing_ok=True), None)


def _write(path: Path) -> tuple[str, int]:
    """Write a file and return what is in it, and how many folders above the path it lies.

    Where the path itself is not there yet, it is the same number of folders up for all ranks.
    """
    token = secrets.token_hex(8)
    base = existing(path)
    file = base / f"{PREFIX}{token}"
    try:
        file.write_text(token)
    except OSError:
        file.unlink(missing_ok=True)  # on a full disk it is there, and empty
        raise
    return token, len(path.parts) - len(base.parts)


def _look(file: Path, token: str, wait_s: float) -> str:
    """Read the file until it is there; nothing tells when another node's file appears."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            next(file.parent.iterdir(), None)  # asks an NFS server anew
            if file.read_text() == token:
                return ""
            problem = "reads it incomplete"
        except FileNotFoundError:
            problem = "does not see it"
        except OSError as error:
            problem = f"cannot read it ({error.strerror})"
        if time.monotonic() > deadline:
            return problem
        time.sleep(_LOOK_EVERY_S)


def shared_folder(allocation: Allocation) -> Finding | None:
    """Whether all ranks see the same run directory."""
    if allocation.measured is None or allocation.measured.unshared is None:
        return None
    folder = allocation.ranks[0].folder
    assert folder is not None, "rank 0 is the first of its node"
    if blind := [(r, why) for r, why in enumerate(allocation.measured.unshared) if why]:
        rank, why = blind[0]
        more = f" ({len(blind)} ranks in all)" if len(blind) > 1 else ""
        return red(
            f"rank 0 wrote a file for {folder.path}; {allocation.ranks[rank].label} {why}{more}",
            "Give --run-dir as an absolute path on a file system that all nodes share.",
        )
    return green("all ranks see the same")
