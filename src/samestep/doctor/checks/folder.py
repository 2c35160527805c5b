"""Checks of the run directory, as each node sees it."""

from samestep.doctor.check import Check, Finding, green, red, yellow
from samestep.doctor.facts.folder import Folder

ESTIMATED_CHECKPOINT_BYTES = 1_200_000_000
"""Where no run tells: 100 million parameters, in fp32 with Adam's two moments 12 bytes each."""
FEW_CHECKPOINTS = 3
"""Where it is not known how many are kept: the last, the best, and the one being written."""
FULL_BYTES = 64 << 20
"""Less than this is a full disk for any run."""


def run_directory(folder: Folder) -> Finding:
    """Whether a file can be written there whole: under another name, synced, then renamed."""
    if folder.problem:
        return red(
            f"{folder.path}: {folder.problem}",
            "Mend its permissions, or choose another place with --run-dir.",
        )
    return green(f"{folder.path} can be written, renaming is atomic")


def free_space(folder: Folder) -> Finding | None:
    """Whether the checkpoints that the run will keep have room."""
    if folder.free_bytes is None:
        return None
    one = folder.checkpoint_bytes or ESTIMATED_CHECKPOINT_BYTES
    count = folder.num_checkpoints or FEW_CHECKPOINTS
    measured = "measured" if folder.checkpoint_bytes else "estimated: no run was named"
    found = (
        f"{_gb(folder.free_bytes)} free; {count} checkpoints of {_gb(one)} ({measured}) "
        f"take {_gb(count * one)}"
    )
    advice = "Free some space, keep fewer (--keep-top-k 2), or choose another --run-dir."
    # A checkpoint is written beside the one that it replaces.
    if folder.free_bytes < max(FULL_BYTES, 2 * (folder.checkpoint_bytes or 0)):
        return red(found, advice)
    if folder.free_bytes < count * one:
        return yellow(found, advice)
    return green(found)


CHECKS: list[Check[Folder]] = [run_directory, free_space]


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"
