"""Facts and checks of one machine."""

import os
import socket
import sys
import threading
import time
from dataclasses import replace

import pytest

from samestep.doctor import node as checks
from samestep.doctor.findings import run_checks, worst
from samestep.doctor.timeouts import call_within, still_waiting, value_within
from tests.doctor.situations import GIB, H100, MACHINE, gpus, says

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


def test_locked_memory_matters_where_cards_read_it_and_what_is_not_here_has_no_row():
    says(checks.locked_memory(replace(MACHINE, locked_bytes=8 << 20)), "green", "no InfiniBand")
    says(checks.locked_memory(replace(MACHINE, has_rdma=True)), "green", "no limit")
    assert checks.shared_memory(replace(MACHINE, shm_bytes=None)) is None
    assert checks.gpus(MACHINE) is None
    assert checks.internet(replace(MACHINE, offline=None)) is None


def test_the_facts_of_this_machine_are_read_and_pass_for_what_they_are():
    machine = checks.read_machine()
    assert machine.python == ".".join(map(str, sys.version_info[:3]))
    assert machine.host == socket.gethostname()
    assert checks.read_machine(environment={"SLURMD_NODENAME": "node7"}).host == "node7"
    if hasattr(os, "sched_getaffinity"):
        assert set(machine.cores) == os.sched_getaffinity(0)
    assert not any(
        f.found.startswith("this check broke") for f in run_checks(checks.CHECKS, machine)
    )


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
