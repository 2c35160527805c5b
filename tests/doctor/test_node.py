"""Facts and checks of one machine, its GPU and the run directory."""

import json
import os
import re
import socket
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from samestep.base.machine import link_gb_s, peak_flops_per_s
from samestep.cluster.doctor import gpu_health
from samestep.cluster.doctor import node as checks
from samestep.cluster.doctor import run_directory as folders
from samestep.cluster.doctor.findings import run_checks, worst
from samestep.cluster.doctor.rank_facts import GpuHealth, call_within, still_waiting, value_within
from samestep.cluster.doctor.run_directory import read_folder
from tests.doctor.situations import FOLDER, GIB, H100, MACHINE, gpus, says

WITH_GPUS = replace(
    MACHINE, cuda="12.8", driver="570.1", nccl="2.27.3", gpus=gpus(4), num_gpus_in_node=4
)


@pytest.mark.parametrize("machine", [MACHINE, WITH_GPUS], ids=["cpu", "gpus"])
def test_a_healthy_machine_is_all_green(machine):
    assert worst(run_checks(checks.CHECKS, machine)) == "green"


# Check → changes that plant a fault, each with the status and words that it must say.
FAULTS = {
    checks.python: [({"python": "3.9.2"}, "red: 3.11")],
    checks.torch: [({"torch": "2.3.0+cu118"}, "red: pip install")],
    checks.cuda: [({"cuda": ""}, "yellow: without CUDA"), ({"gpus": ()}, "red: 570.1 | 12.8")],
    checks.gpus: [
        ({"gpus": (H100, replace(H100, name="A100"))}, "yellow: 1 × A100"),
        ({"gpus": (H100, replace(H100, used_bytes=20 * GIB))}, "yellow: 25% | GPU 1"),
    ],
    checks.cores: [
        ({"quota_cores": 2.5}, "yellow: --threads 2"),
        ({"quota_cores": 0.5}, "red: 0.5"),
    ],
    checks.shared_memory: [
        ({"shm_bytes": 64 << 20, "shm_free_bytes": 64 << 20}, "red: --shm-size"),
        ({"shm_bytes": GIB // 2, "shm_free_bytes": GIB // 2}, "yellow: 512 MiB free"),
        ({"shm_free_bytes": 1 << 20}, "red: /dev/shm"),
        ({"shm_free_bytes": 5 * GIB}, "yellow: 5 GiB free"),
        (
            {"shm_stale": ("/dev/shm/torch_1", "/dev/shm/psm_2"), "shm_stale_bytes": 3 * GIB},
            "yellow: 2 files | 3 GiB | rm /dev/shm/torch_1 /dev/shm/psm_2",
        ),
    ],
    checks.open_files: [
        ({"open_files": 512}, "yellow: ulimit -n"),
        ({"open_files": 64}, "red: ulimit -n"),
    ],
    checks.processes: [
        ({"processes": 1024}, "yellow: ulimit -u"),
        ({"processes": 100}, "red: ulimit -u"),
    ],
    checks.locked_memory: [({"has_rdma": True, "locked_bytes": 8 << 20}, "red: ulimit -l")],
    checks.internet: [({"offline": "no route"}, "yellow: WANDB_MODE=offline")],
}


@pytest.mark.parametrize("check", FAULTS)
def test_each_planted_fault_is_found_and_comes_with_advice(check):
    for changes, said in FAULTS[check]:
        says(check(replace(WITH_GPUS, **changes)), said)


def test_a_version_of_torch_is_told_as_tried_newer_or_neither_and_the_table_has_those_tried():
    table = (Path(__file__).parents[2] / "docs/project/versions.md").read_text()
    rows = re.findall(r"^\| (2\.\d+\.\d+)", table, re.MULTILINE)
    assert tuple(sorted({*rows})) == checks.TRIED_TORCH
    newest = checks.TRIED_TORCH[-1]
    said = {f"{newest}+cpu": ": tested", "99.0": f"newer | {newest}", "2.12.0": "not"}
    for version, words in said.items():
        says(checks.torch(replace(MACHINE, torch=version)), f"green: {words}")


def test_the_facts_of_this_machine_pass_and_what_is_not_here_has_no_row():
    machine = checks.read_machine()
    assert machine.python == ".".join(map(str, sys.version_info[:3]))
    assert machine.host == socket.gethostname()
    assert checks.read_machine(environment={"SLURMD_NODENAME": "node7"}).host == "node7"
    if hasattr(os, "sched_getaffinity"):
        assert set(machine.cores) == os.sched_getaffinity(0)
    assert not any(
        f.found.startswith("this check failed") for f in run_checks(checks.CHECKS, machine)
    )
    says(checks.locked_memory(replace(MACHINE, locked_bytes=8 << 20)), "green", "no InfiniBand")
    says(checks.locked_memory(replace(MACHINE, has_rdma=True)), "green", "no limit")
    assert checks.shared_memory(replace(MACHINE, shm_bytes=None)) is None
    assert checks.gpus(MACHINE) is None
    assert checks.internet(replace(MACHINE, offline=None)) is None


def test_a_recipe_file_is_known_by_its_content_a_stale_shared_file_by_its_use(tmp_path):
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_text("a = 1")
    other.write_text("a = 2")
    assert checks.hash_of_recipe(None) == ""
    assert checks.hash_of_recipe(tmp_path / "none.py") == "missing"
    assert checks.hash_of_recipe(one) != checks.hash_of_recipe(other)
    shm, processes = tmp_path / "shm", tmp_path / "proc"
    (processes / "7" / "fd").mkdir(parents=True)
    shm.mkdir()
    sizes = {"left": 2 << 20, "larger": 3 << 20, "mapped": 2 << 20, "open": 2 << 20, "small": 9}
    for name, size in sizes.items():
        (shm / name).write_bytes(bytes(size))
    (processes / "7" / "maps").write_text(f"7f0-7f1 rw-s 00000000 00:1a 33   {shm}/mapped\n")
    (processes / "7" / "fd" / "3").symlink_to(shm / "open")
    assert checks.stale_files(shm, processes) == {}, "they are too young"
    later = time.time() + checks.STALE_S + 1
    found = checks.stale_files(shm, processes, now=later)
    assert found == {str(shm / "larger"): 3 << 20, str(shm / "left"): 2 << 20}
    assert list(found) == [str(shm / "larger"), str(shm / "left")]


def test_what_does_not_answer_or_fails_is_given_up_in_time_and_told_or_replaced():
    def fail() -> str:
        raise OSError("no such host")

    assert value_within(60.0, fail, otherwise="nothing") == "nothing"
    with pytest.raises(OSError, match="host"):
        call_within(60.0, fail)
    answer = threading.Event()
    assert value_within(0.05, answer.wait, otherwise=False) is False
    with pytest.raises(TimeoutError, match=r"0\.05 s"):
        call_within(0.05, answer.wait)
    assert still_waiting()
    answer.set()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.name.startswith("samestep"):
            thread.join()
    assert not still_waiting()


def test_a_folder_is_green_a_file_and_a_silent_file_system_red(tmp_path, monkeypatch):
    folder = read_folder(tmp_path / "runs" / "deep")
    assert folder.problem == ""
    assert list(tmp_path.iterdir()) == []
    says(folders.run_directory(folder), "green", str(tmp_path))
    (tmp_path / "runs").write_text("not a folder")
    for path in (tmp_path / "runs", tmp_path / "runs" / "below"):
        says(folders.run_directory(read_folder(path)), "red", str(tmp_path / "runs"), "--run-dir")
    assert (tmp_path / "runs").read_text() == "not a folder"
    # Nobody, not even root, makes a folder there.
    says(folders.run_directory(read_folder(Path("/proc/none"))), "red", "--run-dir")
    answer = threading.Event()
    monkeypatch.setattr(folders, "_ANSWER_S", 0.05)
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda _: answer.wait())
    folder = read_folder(tmp_path)
    answer.set()
    says(folders.run_directory(folder), "red", "0.05 s")


@contextmanager
def as_a_stranger():  # be a user to whom pytest's folders are closed, where this one is root
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_folder_that_this_user_may_not_look_into_is_red_and_its_space_is_not_judged(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    with as_a_stranger():
        folder = read_folder(closed / "runs")
    says(folders.run_directory(folder), "red", "Permission denied", "--run-dir")
    assert folders.free_space(folder) is None


@pytest.fixture
def run(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "settings.toml").write_text("epochs = 5\nnum_workers = 3\n")
    for epoch in (1, 2):
        (tmp_path / "checkpoints" / f"checkpoint_epoch_{epoch}.pt").write_bytes(b"x" * epoch * 1000)
    plan = {"num_samples": 90, "global_batch_size": 80, "steps_per_epoch": 1}  # with --drop-last
    records = [{"event": "start", "resumed": False, **plan}] + [
        {"event": "epoch", "epoch": e, "step": e, "train_seconds": 10.0, "samples": 80 // e}
        for e in (1, 2)  # it was stopped within the second
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return tmp_path


def test_a_run_tells_the_size_of_its_checkpoints_its_workers_and_the_time_of_an_epoch(run):
    folder = read_folder(run)
    assert folder.checkpoint_bytes in (1000, 2000)
    assert (folder.num_checkpoints, folder.num_workers, folder.epoch_s) == (5, 3, 20.0)
    (run / "settings.toml").write_text("keep_top_k = 2\n")
    assert read_folder(run).num_checkpoints == 4
    (run / "settings.toml").write_text("not = = toml")  # then it is any folder
    folder = read_folder(run)
    assert (folder.problem, folder.epoch_s, folder.checkpoint_bytes) == ("", None, None)


# free, of one checkpoint, how many are kept → status
SPACE = {
    (1000e9, None, None): "green",
    (2e9, None, None): "yellow",  # three of the estimated size do not fit
    (10e6, None, None): "red",
    (10e9, 1_000_000_000, 5): "green",
    (3e9, 1_000_000_000, 5): "yellow",
    (1.5e9, 1_000_000_000, 5): "red",  # the next is written beside the last
}


@pytest.mark.parametrize("case", SPACE, ids=str)
def test_free_space_is_judged_by_the_checkpoints_that_will_be_kept(case):
    free, one, count = case
    folder = replace(FOLDER, free_bytes=int(free), checkpoint_bytes=one, num_checkpoints=count)
    says(folders.free_space(folder), SPACE[case], "measured" if one else "estimated")
    assert worst(run_checks(folders.CHECKS, folder)) == SPACE[case]


SPEEDS = {"bf16_tflop_s": 690.0, "peak_tflop_s": 989.4, "to_gpu_gb_s": 54.0, "from_gpu_gb_s": 52.0}
HEALTHY = GpuHealth(**SPEEDS, link_gb_s=63.0, clock_mhz=1980, most_mhz=1980, uncorrected=0)
GPU_FAULTS = {
    gpu_health.gpu_speed: [({"bf16_tflop_s": 310.0}, "yellow: 31% | nvidia-smi")],
    gpu_health.gpu_copies: [
        ({"from_gpu_gb_s": 12.0}, "yellow: 12.0 GB/s | carries 63"),
        ({"link_gb_s": None, "to_gpu_gb_s": 3.0}, "yellow: 3.0 GB/s"),
    ],
    gpu_health.gpu_clocks: [
        ({"clock_mhz": 900, "slowed_by": ("power brake",)}, "yellow: 900 | brake")
    ],
    gpu_health.gpu_memory: [({"uncorrected": 2}, "red: 2 uncorrectable | --exclude")],
    gpu_health.gpu_processes: [({"others": (41, 42)}, "yellow: 2 other | PID 41, 42")],
}
# What nvidia-smi of this shape prints; the other GPU is another job's.
NVIDIA_SMI = """#!/bin/sh
case "$1" in
*compute-apps*) printf 'GPU-aa, 11\\nGPU-aa, 1\\nGPU-bb, 12\\n' ;;
*clocks_event_reasons*) echo "Field is not valid" >&2; exit 2 ;;
*) printf 'GPU-bb, 210, 1980, 7, 5, 16, 0x1\\nGPU-aa, 1200, 1980, [N/A], 5, 16, 0x44\\n' ;;
esac
"""


def test_a_healthy_gpu_is_all_green_by_the_rates_of_its_data_sheet():
    found = run_checks(gpu_health.CHECKS, HEALTHY)
    assert (len(found), worst(found)) == (4, "green")
    unknown = replace(HEALTHY, peak_tflop_s=None, clock_mhz=None, uncorrected=None)
    assert worst(run_checks(gpu_health.CHECKS, unknown)) == "green"
    assert peak_flops_per_s("NVIDIA H200", "bf16", tf32=False) == 989.4e12
    assert peak_flops_per_s("NVIDIA H200", "fp32", tf32=True) == 494.7e12
    assert peak_flops_per_s("NVIDIA A10G", "bf16", tf32=False) is None, "not an A10"
    assert link_gb_s(4, 16) == pytest.approx(31.5, rel=0.01)
    assert link_gb_s(9, 16) is None


@pytest.mark.parametrize("check", GPU_FAULTS)
def test_each_planted_fault_of_a_gpu_is_found_and_comes_with_advice(check):
    for changes, said in GPU_FAULTS[check]:
        says(check(replace(HEALTHY, **changes)), said)


def test_what_an_older_nvidia_smi_says_of_this_gpu_is_read(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(gpu_health, "_measure", lambda _: (5e14, 50.0, 49.0))
    found = gpu_health.read_gpu(torch.device("cuda", 0), "aa", "NVIDIA H100 PCIe")
    speeds = {"bf16_tflop_s": 500.0, "peak_tflop_s": 756.0, "to_gpu_gb_s": 50.0}
    speeds |= {"from_gpu_gb_s": 49.0, "link_gb_s": pytest.approx(63.0, rel=0.01)}
    clocks = {"clock_mhz": 1200, "most_mhz": 1980, "slowed_by": ("heat (hardware)",)}
    assert found == GpuHealth(**speeds, **clocks, others=(11, 1))
    monkeypatch.setenv("PATH", "")
    unknown = gpu_health.read_gpu(torch.device("cuda", 0), "aa", "a new GPU")
    assert (unknown.clock_mhz, unknown.link_gb_s, unknown.others) == (None, None, ())
    assert unknown.peak_tflop_s is None
