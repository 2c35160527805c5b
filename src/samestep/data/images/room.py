"""How much memory is free on this node, for this job: what the kernel and its cgroup say."""

import sys
from pathlib import Path

_KIB = 1024
_NO_LIMIT = 1 << 60  # cgroup v1 writes "unlimited" as a number near 2^63


def free_memory_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that may still be used; None where the platform does not say.

    The smallest of what the machine has available and what each cgroup above this process still
    allows: schedulers and containers limit jobs by these
    (https://docs.kernel.org/admin-guide/cgroup-v2.html#memory).

    Args:
        root: where /proc and /sys are; another one in tests.
    """
    if not sys.platform.startswith("linux"):
        return None
    found = [_available(root), *_cgroups(root)]
    known = [number for number in found if number is not None]
    return max(0, min(known)) if known else None


def _available(root: Path) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        return int(fields["MemAvailable"].split()[0]) * _KIB
    except (OSError, KeyError, ValueError):
        return None


def _cgroups(root: Path) -> list[int | None]:
    """Return what each cgroup that this process is in, and each above it, has left."""
    mounts = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    left: list[int | None] = []
    for line in lines:
        _number, controllers, path = line.split(":", 2)
        if controllers == "":
            names = ("memory.max", "memory.current")
            top = mounts
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            top = mounts / "memory"
        else:
            continue
        parts = [part for part in path.split("/") if part and part != ".."]
        # In a container the path may be of the host: then its own group is the mount itself.
        groups = (top.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1))
        left += [_left(group, *names) for group in groups]
    return left


def _left(group: Path, limit_name: str, usage_name: str) -> int | None:
    try:
        limit = int((group / limit_name).read_text())  # "max" is no number: no limit
        used = int((group / usage_name).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    # Files read long ago count as used, and are dropped as soon as the memory is needed.
    reclaimable = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    return limit - used + reclaimable if limit < _NO_LIMIT else None
