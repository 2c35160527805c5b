"""Cores, processor time and memory that this process may use; peak rates of devices; nvidia-smi.

Schedulers and containers limit a job by control groups. A group inherits the limits of all groups
above it, so the smallest counts (https://docs.kernel.org/admin-guide/cgroup-v2.html). `root` is
the folder of /proc and /sys; tests use another one.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

_KIB = 1024
_NVIDIA_SMI_S = 10.0
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
    """Return the bytes that may still be used; None where the platform does not say."""
    if not sys.platform.startswith("linux"):
        return None
    limits = [_available(root), *(_memory_left(group) for group in _groups("memory", root))]
    numbers = [number for number in limits if number is not None]
    return max(0, min(numbers)) if numbers else None


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


_TERA = 10**12
# Dense rates in 10¹² operations per second: of bf16 and fp16, of TF32, of fp32, and of fp64, the
# faster of the two units where a device has tensor cores for it. By the makers' data sheets: NVIDIA
# B200 (HGX), H200, H100, A100, A40, A10, L40S, L4, V100 and T4, and AMD Instinct MI300X. A data
# sheet's "with sparsity" is halved.
_RATES: dict[str, tuple[float, float, float, float]] = {
    "B200": (2250.0, 1125.0, 75.0, 37.0),
    "H200": (989.4, 494.7, 66.9, 66.9),
    "H100 80GB HBM3": (989.4, 494.7, 66.9, 66.9),
    "H100 PCIe": (756.0, 378.0, 51.0, 51.0),
    "H100 NVL": (835.0, 417.5, 60.0, 60.0),
    "GH200 480GB": (989.4, 494.7, 66.9, 66.9),
    "A100-SXM4-80GB": (312.0, 156.0, 19.5, 19.5),
    "A100-SXM4-40GB": (312.0, 156.0, 19.5, 19.5),
    "A100 80GB PCIe": (312.0, 156.0, 19.5, 19.5),
    "A100-PCIE-40GB": (312.0, 156.0, 19.5, 19.5),
    "A40": (149.7, 74.8, 37.4, 0.58),
    "A10": (125.0, 62.5, 31.2, 0.49),
    "L40S": (362.0, 183.0, 91.6, 1.4),
    "L4": (121.0, 60.0, 30.3, 0.47),
    "V100-SXM2-16GB": (125.0, 15.7, 15.7, 7.8),
    "V100-SXM2-32GB": (125.0, 15.7, 15.7, 7.8),
    "T4": (65.0, 8.1, 8.1, 0.25),
    "Instinct MI300X": (1307.4, 653.7, 163.4, 163.4),
}
_MAKERS = ("NVIDIA ", "Tesla ", "AMD ")
_GB_S_PER_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""Of PCI Express by its generation, in each direction, after encoding (PCI-SIG)."""


def peak_flops_per_s(device_name: str, precision: str, *, tf32: bool) -> float | None:
    """Return a device's peak rate in FLOP/s by the name that PyTorch gives it, or None."""
    for maker in _MAKERS:
        device_name = device_name.removeprefix(maker)
    rates = _RATES.get(device_name)
    if rates is None:
        return None
    place = {"bf16": 0, "fp16": 0, "fp32": 1 if tf32 else 2, "fp64": 3}[precision]
    return rates[place] * _TERA


def link_gb_s(generation: int, lanes: int) -> float | None:
    """Return the peak rate of a PCI Express link per direction, in 10⁹ bytes per second."""
    each = _GB_S_PER_LANE.get(generation)
    return None if each is None else each * lanes


def nvidia_smi(kind: str, *fields: str) -> list[list[str]]:
    """Return nvidia-smi's rows for all GPUs, or for all processes; none if it is not installed."""
    import csv  # noqa: PLC0415 - only where a GPU is looked at
    import subprocess  # noqa: PLC0415 - same

    command = ["nvidia-smi", f"--query-{kind}={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        printed = subprocess.check_output(command, stderr=subprocess.PIPE, timeout=_NVIDIA_SMI_S)
    except (OSError, subprocess.SubprocessError):
        return []  # there is none, or it does not know a field
    rows = csv.reader(printed.decode(errors="replace").splitlines(), skipinitialspace=True)
    return [row for row in rows if len(row) == len(fields)]
