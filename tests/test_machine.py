"""What a process may use of its machine, read from made-up /proc and /sys."""

import os
from pathlib import Path

import pytest

from samestep.base.machine import free_memory_bytes, quota_cores, usable_cores

GIB = 1 << 30


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_usable_cores_are_those_of_the_affinity_without_a_quota(tmp_path):
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else usable_cores()
    assert usable_cores() == allowed
    assert 1 <= len(usable_cores()) <= os.cpu_count()
    assert quota_cores(tmp_path) is None


def version_1(folder: str, quota_us: int) -> dict[str, str]:
    return {f"{folder}/cpu.cfs_quota_us": str(quota_us), f"{folder}/cpu.cfs_period_us": "100000"}


NO_LIMIT, STEP = "max 100000", "job/step/cpu.max"
# /proc/self/cgroup, the files of the groups, the cores that they give
GROUPS = {
    "version 2": ("0::/job/step", {"job/cpu.max": "150000 100000", STEP: NO_LIMIT}, 1.5),
    "version 1": ("4:cpu,cpuacct:/docker/x", version_1("cpu,cpuacct/docker/x", 300_000), 3.0),
    "version 1, none": ("4:cpu:/", version_1("cpu", -1), None),
    "version 1, the host's path": ("4:cpu:/docker/x", version_1("cpu", 50_000), 0.5),
    "both": ("4:cpu:/\n0::/", version_1("cpu", 200_000) | {"unified/cpu.max": NO_LIMIT}, 2.0),
    "neither": ("4:memory:/x", {}, None),
}


@pytest.mark.parametrize("kind", GROUPS)
def test_the_control_groups_quota_is_read(tmp_path, kind):
    lines, files, cores = GROUPS[kind]
    write(tmp_path / "proc/self/cgroup", f"{lines}\n")
    for name, text in files.items():
        write(tmp_path / "sys/fs/cgroup" / name, f"{text}\n")
    assert quota_cores(tmp_path) == cores


def test_free_memory_is_the_least_that_machine_and_groups_allow_of_either_kind(tmp_path):
    assert free_memory_bytes(tmp_path) is None
    write(tmp_path / "proc/meminfo", f"MemTotal: 99 kB\nMemAvailable: {8 * 2**20} kB\n")
    assert free_memory_bytes(tmp_path) == 8 * GIB
    write(tmp_path / "proc/self/cgroup", "0::/job/step\n")
    top = tmp_path / "sys/fs/cgroup"
    for group, limit, used, inactive in (
        ("job", 6 * GIB, 3 * GIB, GIB),
        ("job/step", "max", 3 * GIB, 0),
    ):
        write(top / group / "memory.max", f"{limit}\n")
        write(top / group / "memory.current", f"{used}\n")
        write(top / group / "memory.stat", f"anon 5\ninactive_file {inactive}\n")
    assert free_memory_bytes(tmp_path) == 4 * GIB
    write(tmp_path / "older" / "proc/meminfo", f"MemAvailable: {8 * 2**20} kB\n")
    write(tmp_path / "older" / "proc/self/cgroup", "5:cpu,cpuacct:/x\n3:memory:/docker/ab\n")
    # The container sees its own group as the mount.
    group = tmp_path / "older" / "sys/fs/cgroup/memory"
    write(group / "memory.limit_in_bytes", f"{2 * GIB}")
    write(group / "memory.usage_in_bytes", f"{GIB}")
    write(group / "memory.stat", "inactive_file 7\ntotal_inactive_file 0\n")
    assert free_memory_bytes(tmp_path / "older") == GIB
    write(group / "memory.limit_in_bytes", f"{2**63 - 4096}")
    assert free_memory_bytes(tmp_path / "older") == 8 * GIB
