"""Facts of a healthy machine, rank and allocation, to plant a fault in; what a table says."""

import json
from dataclasses import replace
from typing import Any

from samestep.cluster.doctor import rank_facts
from samestep.cluster.doctor.findings import Finding
from samestep.cluster.doctor.rank_facts import (
    Address,
    Allocation,
    AllReduce,
    Folder,
    Gpu,
    RankFacts,
)
from samestep.launch.ranks.launch import Launch

Row = dict[str, str]

GIB = 1 << 30
H100 = Gpu(name="NVIDIA H100", uuid="0", memory_bytes=80 * GIB)
CORES = {"machine_cores": 64, "cores": tuple(range(16))}
LIMITS = {"shm_bytes": 64 * GIB, "shm_free_bytes": 64 * GIB, "open_files": 65536}
LIMITS |= {"processes": 65536, "offline": ""}
VERSIONS = {"python": "3.12.1", "torch": "2.13.0", "samestep": "0.1.0", "code": "aaaa"}
MACHINE = rank_facts.Machine(host="node1", **VERSIONS, **CORES, **LIMITS)
FOLDER = Folder(path="/shared/runs", free_bytes=1000 * GIB)
SLURM = rank_facts.SlurmTask(
    job="7", in_step=True, num_tasks=4, job_nodes=2, most_step_tasks_on_node=2
)
JOB = rank_facts.SlurmJob(is_batch=True, requeue=True, time_limit="1-00:00:00", signal="USR1@120")


def gpus(number: int, host: str = "node1") -> tuple[Gpu, ...]:
    return tuple(replace(H100, uuid=f"{host}-{index}") for index in range(number))


def rank(number: int = 0, *, world_size: int = 1, per_node: int = 2, **changes) -> RankFacts:
    """Return a healthy rank; `changes` to its machine are given as `machine={…}`."""
    node = number // per_node
    host = f"node{node + 1}"
    place = {"rank": number, "world_size": world_size, "local_rank": number % per_node}
    place |= {"local_world_size": min(per_node, world_size), "node": node}
    place |= {"num_nodes": -(-world_size // per_node), "master_addr": "node1"}
    launcher = "srun" if world_size > 1 else "none"
    launch = Launch(launcher=launcher, master_port=12345, **place)
    local = f"10.0.0.{node + 1}"
    address = Address(place=host, master="10.0.0.1", local=local, interface="eth0", own=local)
    machine = {"host": host} | changes.pop("machine", {})
    address = replace(address, **changes.pop("address", {}))
    launch = replace(launch, **changes.pop("launch", {}))
    return RankFacts(
        launch=launch,
        machine=replace(MACHINE, **machine),
        address=address,
        **{"folder": FOLDER, **changes},
    )


def four(**changes) -> list[RankFacts]:
    """Return four healthy ranks on two nodes; `changes` are to rank 3 alone."""
    return [rank(r, world_size=4, **(changes if r == 3 else {})) for r in range(4)]


MEASURED = rank_facts.Measurements(
    clock_s=(0.0, 0.0, 0.001, 0.001),
    unshared=("",) * 4,
    matmul_s=(1e-3,) * 4,
    links=(),
    all_reduce=(
        AllReduce(bytes=32, latency_us=40.0, bus_gb_s=0.001),
        AllReduce(bytes=256 << 20, latency_us=20_000.0, bus_gb_s=10.0),
    ),
)


def allocation(ranks: list[RankFacts] | None = None, **measured) -> Allocation:
    """Return a healthy allocation of four ranks, but for what is given."""
    return Allocation(ranks=tuple(ranks or four()), measured=replace(MEASURED, **measured))


def in_job(**changes) -> RankFacts:
    """Return rank 0 of four in a healthy batch job, but for what is given."""
    slurm = replace(SLURM, **changes.pop("slurm", {}))
    return rank(0, world_size=4, slurm=slurm, **{"job": JOB, **changes})


def says(finding: Finding | None, said: str, *more: str) -> None:
    """Assert a finding's status and words, "red: rank 1 | --flag"; problems have advice."""
    assert finding is not None
    status, _, text = said.partition(": ")
    assert finding.status == status, finding
    words = (*text.split(" | "), *more)
    assert all(word in finding.found + finding.advice for word in words), finding
    assert finding.status == "green" or finding.advice


def rows_of(printed: str) -> dict[str, Row]:
    return rows_in(json.loads(printed))


def rows_in(table: dict[str, Any]) -> dict[str, Row]:
    return {row["name"]: row for row in table["checks"]}


def reds(rows: dict[str, Row]) -> set[str]:
    red = {name for name, row in rows.items() if row["status"] == "red"}
    assert all(rows[name]["advice"] for name in red)
    return red
