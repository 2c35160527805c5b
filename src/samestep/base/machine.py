"""Cores, processor time and memory that this process may use.

Schedulers and containers limit a job by control groups. A group inherits the limits of all groups
above it, so the smallest counts (https://docs.kernel.org/admin-guide/cgroup-v2.html). `root` is
the folder of /proc and /sys; tests use another one.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

_KIB = 1024
_NO_LIMIT = 1 << 60  # cgroup v1 writes "unlimited" as a number near 2^63


def usable_cores() -> frozenset[int]:
    """Return the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def quota_cores(root: Path = Path("/")) -> float | None:
    """Return the CPU quota of the control groups, in cores; None for no limit."""
    return min(filter(None, (_quota(group) for group in _groups("cpu", root))), default=None)


def free_memory_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that may still be used; None where the platform does not say.

    The smallest of what the machine has available and what each control group still allows.
    """
    if not sys.platform.startswith("linux"):
        return None
    found = [_available(root), *(_memory_left(group) for group in _groups("memory", root))]
    known = [number for number in found if number is not None]
    return max(0, min(known)) if known else None


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Yield the control groups of this process and all above them, for a controller."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounts = root / "sys/fs/cgroup"
    for line in lines:
        _number, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            places = [mounts, mounts / "unified"]
        elif controller in controllers.split(","):
            places = [mounts / controllers, mounts / controller]
        else:
            continue
        group = Path(*(part for part in path.split("/") if part and part != ".."))
        # In a container the path may be the host's: then only the mount itself exists.
        yield from dict.fromkeys(place / g for place in places for g in (group, *group.parents))


def _quota(group: Path) -> float | None:
    try:
        if (group / "cpu.max").is_file():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text().strip()
            period = (group / "cpu.cfs_period_us").read_text().strip()
        return int(quota) / int(period) if quota not in ("max", "-1") else None
    except (OSError, ValueError):
        return None


def _available(root: Path) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        return int(fields["MemAvailable"].split()[0]) * _KIB
    except (OSError, KeyError, ValueError):
        return None


def _memory_left(group: Path) -> int | None:
    names = ("memory.max", "memory.current")
    if not (group / names[0]).is_file():
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    try:
        # "max" is not a number: no limit.
        limit, used = (int((group / name).read_text()) for name in names)
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    # Cached files count as used, but are dropped as soon as the memory is needed.
    reclaimable = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    return limit - used + reclaimable if limit < _NO_LIMIT else None
