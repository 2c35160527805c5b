"""Everything that is so for one rank: what the others are told of it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from samestep.doctor.facts.address import Address, read_address
from samestep.doctor.facts.folder import Folder, read_folder
from samestep.doctor.facts.machine import Machine, read_machine
from samestep.doctor.facts.slurm import Slurm, read_slurm
from samestep.ranks.launch import Launch
from samestep.ranks.world import World


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank: its place, its machine, what it sees."""

    launch: Launch
    machine: Machine
    address: Address
    folder: Folder | None = None
    """The run directory; read by one rank of each node."""
    slurm: Slurm | None = None
    device: str = "cpu"
    device_uuid: str = ""
    """Of the GPU that this rank would train on."""
    device_problem: str = ""
    """Why it has no device; empty if it has one."""
    elastic: bool = False
    """Whether torchrun's agent started this rank."""
    num_workers: int = 0
    """Loader workers of this rank in training."""

    @property
    def label(self) -> str:
        """How the user is told of this rank."""
        return f"rank {self.launch.rank} on {self.machine.host}"


def read_rank(
    world: World,
    launch: Launch,
    *,
    run_dir: Path,
    recipe: Path | None = None,
    num_workers: int | None = None,
    device_problem: str = "",
    environment: Mapping[str, str] = os.environ,
) -> Rank:
    """Read the facts of this rank; those of its node are read by the first rank of the node."""
    first = launch.local_rank == 0
    machine = read_machine(recipe, look_outside=first, environment=environment)
    folder = read_folder(run_dir) if first else None
    if num_workers is None:
        num_workers = folder.num_workers if folder else 0
    gpu = world.device.index if world.device.type == "cuda" else None
    return Rank(
        launch=launch,
        machine=machine,
        address=read_address(launch.master_addr, environment),
        folder=folder,
        slurm=read_slurm(environment),
        device=str(world.device),
        device_uuid=machine.gpus[gpu].uuid if gpu is not None else "",
        device_problem=device_problem,
        elastic=bool(environment.get("TORCHELASTIC_RUN_ID")),
        num_workers=num_workers,
    )


def encode(rank: Rank) -> bytes:
    """Return the facts as JSON: unlike a pickle, another version of this program can read it."""
    return msgspec.json.encode(rank)


def decode(data: bytes) -> Rank:
    """Read another rank's facts.

    Raises:
        msgspec.MsgspecError: that rank runs a samestep whose facts are others.
    """
    return msgspec.json.decode(data, type=Rank)


def share_workers(ranks: list[Rank]) -> list[Rank]:
    """Give all ranks the number of workers that rank 0 knows from the run's settings."""
    return [replace(rank, num_workers=ranks[0].num_workers) for rank in ranks]
