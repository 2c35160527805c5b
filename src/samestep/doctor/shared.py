"""Whether the run directory is one and the same place for all ranks."""

import secrets
import time
from pathlib import Path

from samestep.doctor.facts.folder import PREFIX, existing
from samestep.world import World

NFS_WAIT_S = 5.0
"""NFS may remember for some seconds that a file was not there (acregmin, acdirmin: man 5 nfs)."""
_LOOK_EVERY_S = 0.2


def look_for_token(
    world: World, run_dir: Path, wait_s: float = NFS_WAIT_S
) -> tuple[str, ...] | None:
    """Let rank 0 write a file, and every rank look for it.

    Returns:
        Of each rank, why it does not see the file, or nothing if it does; None if rank 0 could
        not write it.
    """
    path = run_dir.absolute()
    token = secrets.token_hex(8)
    base = existing(path)
    # Where the directory itself is not there yet, it is the same number of folders up for all.
    levels = len(path.parts) - len(base.parts)
    file = base / f"{PREFIX}{token}"
    try:
        wrote = world.is_main and _write(file, token)
        written = world.broadcast((token, levels) if wrote else None)
        if written is None:
            return None
        token, levels = written
        place = path.parents[levels - 1] if levels else path
        return tuple(world.gather(_look(place / f"{PREFIX}{token}", token, wait_s)))
    finally:
        if world.is_main:
            file.unlink(missing_ok=True)


def _write(file: Path, token: str) -> bool:
    try:
        file.write_text(token)
    except OSError:
        return False
    return True


def _look(file: Path, token: str, wait_s: float) -> str:
    """Read the file until it is there; nothing tells when another node's file appears."""
    deadline = time.monotonic() + wait_s
    problem = ""
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
