"""Checks of all ranks side by side, on facts that a test makes up."""

import socket
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
import torch

from samestep.doctor import addresses, measurements
from samestep.doctor import all_ranks as ranks
from samestep.doctor.addresses import read_address
from samestep.doctor.diagnosis import SIDE_BY_SIDE
from samestep.doctor.findings import run_checks, worst
from samestep.doctor.rank_facts import Allocation, AllReduce, Link, RankFacts
from samestep.doctor.run_directory import shared_folder
from tests.doctor.situations import allocation, four, gpus, rank, says


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


def test_one_process_is_compared_with_nobody_and_what_is_unknown_is_not_judged():
    alone = Allocation(ranks=(rank(),))
    findings = run_checks(SIDE_BY_SIDE, alone)
    assert [f.name for f in findings] == ["device", "loader workers"]
    assert shared_folder(allocation(unshared=None)) is None


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


def test_speed_is_not_judged_on_one_host_and_where_ranks_take_turns_on_a_core():
    one_host = [replace(r, address=replace(r.address, place="node1")) for r in four()]
    slow = (AllReduce(bytes=1 << 28, latency_us=1e6, bus_gb_s=0.001),)
    found = allocation(one_host, links=(link(0.001),), all_reduce=slow)
    assert measurements.all_reduce(found).status == "green"
    assert measurements.links(found).status == "green"
    assert addresses.announced_address(found) is None
    says(measurements.compute(allocation(each(cores=(0,)), matmul_s=(1, 1, 1, 9.0))), "yellow")


def test_each_node_is_timed_with_the_next_and_two_nodes_once():
    assert measurements.ring([0]) == []
    assert measurements.ring([0, 4]) == [(0, 4)]
    assert measurements.ring([0, 4, 8]) == [(0, 4), (4, 8), (8, 0)]


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


def test_facts_travel_unchanged_and_an_unknown_name_leaves_the_rest_empty():
    for sent in with_gpus():
        assert msgspec.json.decode(msgspec.json.encode(sent), type=RankFacts) == sent
    address = read_address("no-such-host.invalid", {"GLOO_SOCKET_IFNAME": "eth7"})
    assert (address.master, address.local, address.interface) == ("", "", "")
    assert address.gloo_interface == "eth7"
    assert address.place
