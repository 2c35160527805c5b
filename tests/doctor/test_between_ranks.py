"""Checks of all ranks side by side and of a job of Slurm, on facts that a test makes up."""

import socket
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
import torch

from samestep.cluster.doctor import addresses, measurements
from samestep.cluster.doctor import all_ranks as ranks
from samestep.cluster.doctor import slurm_job as checks
from samestep.cluster.doctor.addresses import read_address
from samestep.cluster.doctor.diagnosis import SIDE_BY_SIDE
from samestep.cluster.doctor.findings import run_checks, worst
from samestep.cluster.doctor.rank_facts import Allocation, AllReduce, Link, RankFacts
from samestep.cluster.doctor.run_directory import shared_folder
from samestep.cluster.doctor.slurm_job import read_slurm, signal_of, traps
from samestep.launch.ranks.launch import Launch
from tests.doctor.situations import FOLDER, JOB, allocation, four, gpus, in_job, rank, says
from tests.processes import env


def with_gpus(**changes):
    healthy = [
        replace(
            r,
            device=f"cuda:{r.launch.local_rank}",
            device_uuid=f"{r.machine.host}-{r.launch.local_rank}",
            machine=replace(r.machine, gpus=gpus(2, r.machine.host)),
        )
        for r in four()
    ]
    return [*healthy[:3], replace(healthy[3], **changes)]


def each(**machine):
    return [replace(r, machine=replace(r.machine, **machine)) for r in four()]


def link(gb_s: float, first: int = 0, second: int = 2) -> Link:
    return Link(first=first, second=second, gb_s=gb_s)


@pytest.mark.parametrize("of", [four, with_gpus])
def test_a_healthy_allocation_is_all_green(of):
    healthy = allocation(of(), links=(link(10.0),))
    findings = run_checks(SIDE_BY_SIDE, healthy)
    assert worst(findings) == "green", findings
    assert {"nodes", "links", "all reduce", "clock", "same versions"} <= {f.name for f in findings}


def fourth(**changes) -> Allocation:
    return allocation(four(**changes))


def reduced(size: int, latency_us: float, bus_gb_s: float) -> Allocation:
    reduction = AllReduce(bytes=size, latency_us=latency_us, bus_gb_s=bus_gb_s)
    return allocation(all_reduce=(reduction,))


CROWDED = [rank(machine={"omp_threads": 64, "cores": (0, 1)})]
CROWDED_TOGETHER = [rank(r, world_size=2, machine={"omp_threads": 16}) for r in range(2)]
LINKS = link(10.0), link(9.0), link(1.0, 2, 0)
UNSHARED = ("",) * 2 + ("does not see it",) * 2
# Check → allocations with a fault, each with the status and words that it must say.
FAULTS = {
    ranks.same_versions: [
        (fourth(machine={"torch": "2.12.0"}), "red: torch: 2.12.0 | rank 3 | 2.13.0"),
        (fourth(machine={"samestep": "0.2.0"}), "red: 0.2.0 for rank 3"),
    ],
    ranks.same_code: [(fourth(machine={"code": "bbbb"}), "red: bbbb for rank 3")],
    ranks.recipe: [
        (fourth(machine={"recipe": "missing"}), "red: rank 3"),
        (allocation(each(recipe="a")[:2] + each(recipe="b")[2:]), "red: ranks 2, 3"),
    ],
    ranks.nodes: [(allocation(four()[:3]), "yellow: 1 on node2 | 2 on node1")],
    ranks.device: [
        (fourth(device_problem="Local rank 1 has no GPU"), "red: --device cpu"),
        (allocation(with_gpus(device_uuid="node2-0")), "red: ranks 2, 3"),
        (allocation(with_gpus(device_uuid="", device="cpu")), "yellow: cpu"),
    ],
    ranks.loader_workers: [
        (allocation([replace(r, num_workers=8) for r in four()]), "yellow: --num-workers 7"),
        (allocation(each(cores=(0,))), "yellow: 2 ranks | on 1 cores"),
    ],
    addresses.interface: [
        (fourth(address={"local": "127.0.0.1", "interface": "lo"}), "red: rank 3 | MASTER_ADDR"),
        (fourth(address={"interface": "ib0"}), "yellow: eth0, ib0"),
    ],
    ranks.threads: [
        (allocation(CROWDED), "yellow: OMP_NUM_THREADS=64 | on 2 cores | OMP_NUM_THREADS=2,"),
        (allocation(CROWDED_TOGETHER), "yellow: 2 ranks × 16 on 16 cores | OMP_NUM_THREADS=8,"),
    ],
    addresses.announced_address: [
        (fourth(address={"own": "127.0.1.1"}), "red: GLOO_SOCKET_IFNAME=eth0"),
        (fourth(address={"own": "127.0.1.1", "chosen": "ib0"}), "yellow: GLOO_SOCKET_IFNAME=ib0"),
        (fourth(address={"own": ""}), "red: GLOO_SOCKET_IFNAME=eth0"),
        (fourth(address={"gloo_interface": "lo"}), "red: GLOO_SOCKET_IFNAME=lo"),
    ],
    measurements.clock: [
        (allocation(clock_s=(0, 0, 0, 2.5)), "yellow: 2.5 s"),
        (allocation(clock_s=(0, 0, -3600.0, 0)), "red: 3,600.0 s | rank 2"),
    ],
    shared_folder: [(allocation(unshared=UNSHARED), "red: rank 2 | (2 ranks | --run-dir")],
    measurements.compute: [
        (allocation(matmul_s=(1, 1, 1, 2.0)), "yellow: rank 3 | 2.00 ×"),
        (allocation(matmul_s=(1, 1, 1, 4.0)), "red: 4.00 ×"),
    ],
    measurements.links: [
        (allocation(links=LINKS), "yellow: node2 (node 1) – node1 (node 0) | 1 GB/s"),
        (allocation(links=(link(0.001),)), "red: 1 MB/s"),
        (allocation(links=(link(0.11),)), "yellow: 10 Gbit"),
    ],
    measurements.all_reduce: [
        (reduced(1 << 20, latency_us=1e6, bus_gb_s=0.001), "red: 1 MiB"),
        (reduced(1 << 28, latency_us=1e3, bus_gb_s=0.2), "yellow: 0.2 GB/s | 256 MiB"),
        (allocation(all_reduce=()), "red: --budget-s"),
    ],
}


@pytest.mark.parametrize("check", FAULTS)
def test_each_planted_fault_is_found_and_comes_with_advice(check):
    for faulty, said in FAULTS[check]:
        says(check(faulty), said)


def test_speed_is_judged_between_hosts_and_facts_travel_unchanged():
    one_host = [replace(r, address=replace(r.address, place="node1")) for r in four()]
    slow = (AllReduce(bytes=1 << 28, latency_us=1e6, bus_gb_s=0.001),)
    found = allocation(one_host, links=(link(0.001),), all_reduce=slow)
    assert measurements.all_reduce(found).status == "green"
    assert measurements.links(found).status == "green"
    assert addresses.announced_address(found) is None
    says(measurements.compute(allocation(each(cores=(0,)), matmul_s=(1, 1, 1, 9.0))), "yellow")
    assert measurements.ring([0]) == []
    assert measurements.ring([0, 4]) == [(0, 4)]
    assert measurements.ring([0, 4, 8]) == [(0, 4), (4, 8), (8, 0)]
    alone = Allocation(ranks=(rank(),))
    findings = run_checks(SIDE_BY_SIDE, alone)
    assert [f.name for f in findings] == ["device", "loader workers"]
    assert shared_folder(allocation(unshared=None)) is None
    for sent in with_gpus():
        assert msgspec.json.decode(msgspec.json.encode(sent), type=RankFacts) == sent
    address = read_address("no-such-host.invalid", {"GLOO_SOCKET_IFNAME": "eth7"})
    assert (address.master, address.local, address.interface) == ("", "", "")
    assert address.gloo_interface == "eth7"
    assert address.place


@pytest.mark.parametrize(("backend", "device"), [("gloo", "cpu"), ("nccl", "meta")])
def test_a_link_carries_what_its_backend_can_send(backend, device):
    """Gloo sends from the CPU alone, also where the ranks train on GPUs (here: on `meta`)."""
    sent = []

    def exchange(tensor, partner):
        sent.append((tensor.device.type, partner))
        raise EOFError  # enough is seen

    world = SimpleNamespace(rank=0, device=torch.device("meta"), backend=backend, exchange=exchange)
    with pytest.raises(EOFError):
        measurements.measure_link(world, 0, 1)
    assert sent == [(device, 1)]


def meeting_at(address: str, port: int, number: int = 0):
    return rank(number, launch={"master_port": port}, address={"master": address})


def test_each_fault_of_the_meeting_point_is_found(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        says(addresses.master_port(meeting_at("127.0.0.1", port)), "red", f" {port} ")
        assert addresses.master_port(meeting_at("127.0.0.1", port, 1)) is None
        with monkeypatch.context() as agent:  # torchrun's holds the port
            agent.setattr(addresses, "agent_serves", lambda: True)
            says(addresses.master_port(meeting_at("192.0.2.77", port)), "green", f"{port}")
            says(addresses.master_address(meeting_at("192.0.2.77", port)), "green")
    says(addresses.master_port(meeting_at("127.0.0.1", port)), "green", f"{port}")
    says(addresses.master_address(meeting_at("127.0.0.1", port)), "green", "127.0.0.1")
    says(addresses.master_address(meeting_at("", port)), "red", "node1", "MASTER_ADDR")
    foreign = "192.0.2.77"  # of a net for documentation
    says(addresses.master_address(meeting_at(foreign, port)), "red", foreign)
    says(addresses.master_address(meeting_at(foreign, port, 1)), "green", foreign)


STEP = env("""
    SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_NTASKS=4 SLURM_STEP_NUM_TASKS=4 SLURM_JOB_NUM_NODES=2
    SLURM_STEP_TASKS_PER_NODE=2(x2) SLURM_NTASKS_PER_NODE=2 SLURM_STEP_NODELIST=node[1-2]
    SLURM_GPUS_ON_NODE=2 SLURM_GPUS_PER_TASK=1
""")
SCRIPT = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"}


def test_a_step_is_read_from_its_variables_and_the_signal_from_its_script():
    slurm = read_slurm(STEP)
    assert slurm.in_step
    assert (slurm.num_tasks, slurm.job_nodes, slurm.tasks_per_node) == (4, 2, 2)
    assert (slurm.most_step_tasks_on_node, slurm.gpus_on_node) == (2, 2)
    assert slurm.hosts == ("node1", "node2")
    assert slurm.gpu_bind == "--gpus-per-task=1"
    # Values that are neither numbers nor names are left out.
    slurm = read_slurm(STEP | {"SLURM_GPUS_ON_NODE": "two", "SLURM_STEP_NODELIST": "node[2-1]"})
    assert (slurm.gpus_on_node, slurm.hosts) == (None, ())
    assert read_slurm({}) is None
    found = {"NTASKS_PER_GPU": "--ntasks-per-gpu=1", "GPU_BIND": "--gpu-bind=single:1"}
    for name, bound in found.items():
        variables = {"SLURM_JOB_ID": "7", f"SLURM_{name}": bound.partition("=")[2]}
        assert read_slurm(variables).gpu_bind == bound
    assert read_slurm({"SLURM_JOB_ID": "7", "SLURM_GPU_BIND": "none"}).gpu_bind == ""
    assert signal_of("#!/bin/bash\n#SBATCH --signal=USR1@120\nsrun x") == "USR1@120"
    assert signal_of("#!/bin/bash\n#SBATCH --signal B:TERM@60\nsrun x") == "B:TERM@60"
    assert signal_of("#!/bin/bash\n#SBATCH --nodes=2\nsrun x\n#SBATCH --signal=USR1@120") == ""
    script = "trap 'pass_on USR1' USR1 TERM\n# trap : USR2\n"
    assert traps(script, "B:USR1@120")
    assert traps(script, "B:SIGTERM")
    assert not traps(script, "B:USR2@60")


@pytest.mark.parametrize(
    ("more", "in_script"),
    [({}, True), ({"SLURM_STEP_ID": "4294967291"}, True), ({"SLURM_STEP_ID": "4294967290"}, False)],
)
def test_the_script_and_the_interactive_shell_are_no_steps(more, in_script):
    slurm = read_slurm(SCRIPT | more)
    assert (slurm.in_step, slurm.in_script, slurm.num_tasks) == (False, in_script, 4)


@pytest.mark.parametrize("job", [JOB, None])
def test_a_well_started_job_is_green(job):
    findings = run_checks(checks.CHECKS, in_job(job=job))
    known = [f for f in findings if f.name != "controller"]
    assert worst(known) == "green", findings


ALONE = Launch(note="This is a shell of Slurm job 7.")
OF_TORCHRUN = {"launcher": "torchrun", "num_nodes": 1, "local_world_size": 4}
ONE_GPU = {"machine": {"gpus": gpus(1)}}
SHORT = {"job": replace(JOB, time_limit="30:00"), "folder": replace(FOLDER, epoch_s=3600.0)}

# Check → changes that plant a fault, each with the status and words that it must say.
JOB_FAULTS = {
    checks.slurm_start: [
        ({"launch": vars(ALONE), "slurm": {"in_step": False, "in_script": True}}, "red: srun"),
        ({"launch": vars(ALONE), "slurm": {"in_step": False}}, "yellow: 4 tasks"),
    ],
    checks.torchrun_in_srun: [
        ({"launch": OF_TORCHRUN, "elastic": True}, "red: --ntasks-per-node=1 torchrun")
    ],
    checks.tasks: [
        ({"slurm": {"num_tasks": 3, "tasks_per_node": 2}}, "red: --ntasks=4"),
        ({"launch": {"num_nodes": 1}}, "yellow: srun --nodes=2"),
    ],
    checks.gpu_binding: [
        (ONE_GPU | {"slurm": {"gpu_bind": "--gpu-bind=single:1"}}, "yellow: --gpu-bind=none"),
        (ONE_GPU, "red: 1 GPU | 2 ranks"),
        ({"slurm": {"gpus_on_node": 2}}, "red: 2 GPUs"),
        ({"machine": {"gpus": gpus(4)}}, "yellow: --ntasks-per-node=4"),
    ],
    checks.stop_signal: [
        ({"job": replace(JOB, signal="")}, "yellow: --signal=USR1@120"),
        ({"job": replace(JOB, signal="B:USR1@120")}, "yellow: without B:"),
        ({"job": replace(JOB, signal="USR1@10")}, "yellow: 10 s"),
    ],
    checks.requeue: [({"job": replace(JOB, requeue=False)}, "yellow: --requeue")],
    checks.controller: [({"job": None}, "yellow: scontrol")],
    checks.time_limit: [(SHORT, "yellow: 1:00:00 | --checkpoint-every-minutes")],
}


@pytest.mark.parametrize("check", JOB_FAULTS)
def test_each_planted_fault_of_a_job_is_found_and_comes_with_advice(check):
    for changes, said in JOB_FAULTS[check]:
        says(check(in_job(**changes)), said)


def test_what_is_right_is_green_and_outside_of_slurm_only_the_launcher_is_told():
    says(checks.gpu_binding(in_job(machine={"gpus": gpus(2)})), "green", "2 GPUs")
    one_each = {"slurm": {"most_step_tasks_on_node": 1}, "elastic": True}
    says(checks.torchrun_in_srun(in_job(**one_each)), "green")
    says(checks.stop_signal(in_job(job=replace(JOB, signal="TERM"))), "green", "60 s")
    passed_on = replace(JOB, signal="B:USR1@120", traps_signal=True)
    says(checks.stop_signal(in_job(job=passed_on)), "green", "USR1 120 s", "trap")
    torchrun = {"slurm": {"num_tasks": 2, "tasks_per_node": 4}, "elastic": True}
    says(checks.tasks(in_job(**torchrun)), "green")  # one on each of two nodes
    says(checks.time_limit(in_job(folder=replace(FOLDER, epoch_s=60.0))), "green", "1,440")
    says(checks.time_limit(in_job(job=replace(JOB, time_limit="UNLIMITED"))), "green", "none")
    alone = {"launch": vars(ALONE), "slurm": {"in_step": False, "num_tasks": 1}}
    says(checks.slurm_start(in_job(**alone)), "green", "job 7")
    # What is not a script has neither signal nor requeue.
    interactive = in_job(job=replace(JOB, is_batch=False, signal=None, requeue=False))
    assert checks.stop_signal(interactive) is None
    assert checks.requeue(interactive) is None
    findings = run_checks(checks.CHECKS, rank())
    assert [f.name for f in findings] == ["launcher"]
