"""Facts and checks of one machine."""

import os
import socket
import sys
import threading
import time
from dataclasses import replace

import pytest

from samestep.doctor.bounded import call_within, still_waiting, within
from samestep.doctor.check import run_checks, worst
from samestep.doctor.checks import machine as checks
from samestep.doctor.facts import machine as facts
from tests.doctor.situations import GIB, H100, MACHINE, gpus, says

WITH_GPUS = replace(
    MACHINE, cuda="12.8", driver="570.1", nccl="2.27.3", gpus=gpus(4), num_gpus_in_node=4
)


@pytest.mark.parametrize("machine", [MACHINE, WITH_GPUS], ids=["cpu", "gpus"])
def test_a_healthy_machine_is_all_green(machine):
    assert worst(run_checks(checks.CHECKS, machine)) == "green"


# check → (what is changed, status, what it says)
FAULTS = {
    "old python": (checks.python, {"python": "3.9.2"}, "red", "3.11"),
    "old torch": (checks.torch, {"torch": "2.3.0+cu118"}, "red", "pip install"),
    "build without CUDA": (checks.cuda, {"cuda": ""}, "yellow", "without CUDA"),
    "no usable GPU": (checks.cuda, {"gpus": ()}, "red", "driver 570.1, PyTorch for CUDA 12.8"),
    "two kinds of GPU": (
        checks.gpus,
        {"gpus": (H100, replace(H100, name="A100"))},
        "yellow",
        "1 × A100",
    ),
    "GPU in use": (
        checks.gpus,
        {"gpus": (H100, replace(H100, used_bytes=20 * GIB))},
        "yellow",
        "25% of GPU 1",
    ),
    "quota below affinity": (checks.cores, {"quota_cores": 2.5}, "yellow", "--threads 2"),
    "less than a core": (checks.cores, {"quota_cores": 0.5}, "red", "less than one"),
    "container's shared memory": (
        checks.shared_memory,
        {"shm_bytes": 64 << 20, "shm_free_bytes": 64 << 20},
        "red",
        "--shm-size",
    ),
    "little shared memory": (
        checks.shared_memory,
        {"shm_bytes": GIB // 2, "shm_free_bytes": GIB // 2},
        "yellow",
        "512 MiB free",
    ),
    "shared memory that is full": (
        checks.shared_memory,
        {"shm_free_bytes": 1 << 20},
        "red",
        "ls -l /dev/shm",
    ),
    "few files": (checks.open_files, {"open_files": 512}, "yellow", "ulimit -n"),
    "very few files": (checks.open_files, {"open_files": 64}, "red", "ulimit -n"),
    "few processes": (checks.processes, {"processes": 1024}, "yellow", "ulimit -u"),
    "very few processes": (checks.processes, {"processes": 100}, "red", "ulimit -u"),
    "InfiniBand without locked memory": (
        checks.locked_memory,
        {"has_rdma": True, "locked_bytes": 8 << 20},
        "red",
        "ulimit -l",
    ),
    "offline": (checks.internet, {"offline": "no route"}, "yellow", "WANDB_MODE=offline"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_planted_fault_is_found_and_comes_with_advice(fault):
    check, changes, status, words = FAULTS[fault]
    says(check(replace(WITH_GPUS, **changes)), status, words)


def test_locked_memory_matters_only_where_cards_read_memory():
    says(checks.locked_memory(replace(MACHINE, locked_bytes=8 << 20)), "green", "no InfiniBand")
    says(checks.locked_memory(replace(MACHINE, has_rdma=True)), "green", "no limit")


def test_what_is_not_here_gets_no_row():
    assert checks.shared_memory(replace(MACHINE, shm_bytes=None)) is None
    assert checks.gpus(MACHINE) is None
    assert checks.internet(replace(MACHINE, offline=None)) is None


def test_the_facts_of_this_machine_are_read_and_pass_for_what_they_are():
    machine = facts.read_machine()
    assert machine.python == ".".join(map(str, sys.version_info[:3]))
    assert machine.host == socket.gethostname()
    assert facts.read_machine(environment={"SLURMD_NODENAME": "node7"}).host == "node7"
    if hasattr(os, "sched_getaffinity"):
        assert set(machine.cores) == os.sched_getaffinity(0)
    assert not any(
        f.found.startswith("this check broke") for f in run_checks(checks.CHECKS, machine)
    )


def version_1(folder: str, quota_us: int) -> dict[str, str]:
    """Return the files of a control group of version 1."""
    return {f"{folder}/cpu.cfs_quota_us": str(quota_us), f"{folder}/cpu.cfs_period_us": "100000"}


NO_LIMIT = "max 100000"
# /proc/self/cgroup, the files of the groups, the cores that they give
GROUPS = {
    "version 2": (
        "0::/job/step",
        {"job/cpu.max": "150000 100000", "job/step/cpu.max": NO_LIMIT},
        1.5,
    ),
    "version 2, none": ("0::/", {"cpu.max": NO_LIMIT}, None),
    "version 1": ("4:cpu,cpuacct:/docker/x", version_1("cpu,cpuacct/docker/x", 300_000), 3.0),
    "version 1, none": ("4:cpu:/", version_1("cpu", -1), None),
    "version 1, the host's path": ("4:cpu:/docker/x", version_1("cpu", 50_000), 0.5),
    "both": ("4:cpu:/\n0::/", version_1("cpu", 200_000) | {"unified/cpu.max": NO_LIMIT}, 2.0),
    "neither": ("4:memory:/x", {}, None),
}


@pytest.mark.parametrize("kind", GROUPS)
def test_the_control_groups_quota_is_read(tmp_path, kind):
    lines, files, cores = GROUPS[kind]
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(lines + "\n")
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert facts.quota_cores(tmp_path) == cores


def test_without_control_groups_there_is_no_quota(tmp_path):
    assert facts.quota_cores(tmp_path) is None


def test_a_recipe_file_is_known_by_its_content(tmp_path):
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_text("a = 1")
    other.write_text("a = 2")
    assert facts.hash_of_recipe(None) == ""
    assert facts.hash_of_recipe(tmp_path / "none.py") == "missing"
    assert facts.hash_of_recipe(one) != facts.hash_of_recipe(other)


def test_what_does_not_answer_is_given_up_in_time():
    answer = threading.Event()
    started = time.monotonic()
    assert within(0.05, answer.wait, otherwise=False) is False
    with pytest.raises(TimeoutError, match=r"0\.05 s"):
        call_within(0.05, answer.wait)
    assert time.monotonic() - started < 5
    assert still_waiting()
    answer.set()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.name.startswith("samestep"):
            thread.join()
    assert not still_waiting()


def test_what_fails_is_told_or_replaced():
    def fail() -> str:
        raise OSError("no such host")

    assert within(1.0, fail, otherwise="nothing") == "nothing"
    with pytest.raises(OSError, match="no such host"):
        call_within(1.0, fail)
