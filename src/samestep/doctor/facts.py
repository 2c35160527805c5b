"""What each rank knows of itself, and what all ranks measured: plain data.

It travels as JSON: unlike a pickle, another version of this program can read it. An empty text
means that there is none; None that it is not known, or that a limit is not set.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from samestep.ranks.launch import Launch

K = TypeVar("K")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU that this process may use."""

    name: str
    uuid: str
    memory_bytes: int
    used_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine as one process sees it."""

    host: str
    """Its name; in a Slurm job as Slurm calls it."""
    python: str
    torch: str
    samestep: str
    code: str
    recipe: str = ""
    """Hash of the recipe file; "missing", or empty if none was named."""
    cuda: str = ""
    nccl: str = ""
    driver: str = ""
    gpus: tuple[Gpu, ...] = ()
    num_gpus_in_node: int = 0
    """The NVIDIA GPUs that the kernel knows, whether this process may use them or not."""
    machine_cores: int
    cores: tuple[int, ...]
    omp_threads: int | None = None
    """OMP_NUM_THREADS; None if it is not set, or is no number."""
    quota_cores: float | None = None
    """Cores' worth of time that the control group gives in all; None for no limit."""
    shm_bytes: int | None = None
    shm_free_bytes: int = 0
    shm_stale: tuple[str, ...] = ()
    """Files of this user in /dev/shm, the largest first, that no process has open."""
    shm_stale_bytes: int = 0
    open_files: int | None = None
    processes: int | None = None
    """Limit of processes and threads of this user, as of open files and of locked memory."""
    locked_bytes: int | None = None
    has_rdma: bool = False
    offline: str | None = None
    """Why nothing outside can be reached; empty if it can, None if it was not tried."""


@dataclass(frozen=True, kw_only=True)
class Address:
    """A rank's place in the network."""

    place: str
    """Differs between any two hosts, also between containers with networks of their own."""
    master: str = ""
    local: str = ""
    """This host's own address on the way there."""
    interface: str = ""
    own: str = ""
    """What this host's own name resolves to here; Gloo announces it to the others."""
    chosen: str = ""
    """The interface that samestep names to Gloo by itself; empty where it leaves that to Gloo."""
    gloo_interface: str = ""
    nccl_interface: str = ""


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A run directory, or the folder in which it will be made."""

    path: str
    problem: str = ""
    """Why a file cannot be written there; empty if it can."""
    free_bytes: int | None = None
    checkpoint_bytes: int | None = None
    """Of the newest checkpoint, if this is a run that has one."""
    num_checkpoints: int | None = None
    """How many the run will keep, the one being written counted in; None if not known."""
    num_workers: int = 0
    epoch_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class SlurmTask:
    """A process's place in a Slurm job, by the variables that Slurm sets."""

    job: str
    in_step: bool
    """Whether srun started this process, or its launcher, as a task."""
    in_script: bool = False
    num_tasks: int | None = None
    job_nodes: int | None = None
    hosts: tuple[str, ...] = ()
    tasks_per_node: int | None = None
    most_step_tasks_on_node: int | None = None
    gpus_on_node: int | None = None
    gpu_bind: str = ""
    """By which option each task sees GPUs of its own alone; empty if it sees all of its node."""


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """What Slurm's controller says of a job."""

    is_batch: bool
    requeue: bool
    time_limit: str
    """As Slurm writes it: 1-02:03:04, or UNLIMITED."""
    signal: str | None = None
    """The script's --signal; empty if it has none, None if the script cannot be read."""
    traps_signal: bool = False


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """One rank: its place, its machine, what it sees."""

    launch: Launch
    machine: Machine
    address: Address
    folder: Folder | None = None
    slurm: SlurmTask | None = None
    job: SlurmJob | None = None
    """Read by rank 0 alone, after it met the others."""
    device: str = "cpu"
    device_uuid: str = ""
    device_problem: str = ""
    elastic: bool = False
    num_workers: int = 0

    @property
    def label(self) -> str:
        """How the user is told of this rank."""
        return f"rank {self.launch.rank} on {self.machine.host}"


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """One size of the all-reduce."""

    bytes: int
    latency_us: float
    bus_gb_s: float
    """Bus bandwidth in 10⁹ bytes a second."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """Two nodes, by their first ranks, that sent to each other at the same time."""

    first: int
    second: int
    gb_s: float
    """10⁹ bytes a second in each direction."""


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """What was measured between the ranks."""

    clock_s: tuple[float, ...]
    """How far each rank's clock is ahead of rank 0's."""
    unshared: tuple[str, ...] | None
    """Of each rank, why it does not see rank 0's file; None if there was none to see."""
    matmul_s: tuple[float, ...]
    links: tuple[Link, ...]
    all_reduce: tuple[AllReduce, ...]
    """Of growing sizes, as far as there was time."""


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The ranks that came, and what was measured between them if all could connect."""

    ranks: tuple[RankFacts, ...]
    measured: Measurements | None = None

    @property
    def nodes(self) -> list[list[RankFacts]]:
        """The ranks of each node, in the order of the nodes."""
        return [ranks for _, ranks in sorted(_by(self.ranks, lambda r: r.launch.node).items())]

    @property
    def first_ranks(self) -> tuple[int, ...]:
        """The first rank of each node, in the order of the nodes."""
        return tuple(ranks[0].launch.rank for ranks in self.nodes)

    @property
    def hosts(self) -> dict[str, list[RankFacts]]:
        """The ranks of each host; a Slurm for tests has several nodes on one."""
        return _by(self.ranks, lambda rank: rank.address.place)

    @property
    def spans_hosts(self) -> bool:
        """Whether the ranks are on more than one host, or in several networks of one."""
        return len(self.hosts) > 1


def cores_together(ranks: Sequence[RankFacts]) -> float:
    """Return the cores that the ranks of one host may use together."""
    # srun may give each task its own cores; a quota mostly belongs to one container, for all ranks.
    together = float(len({core for rank in ranks for core in rank.machine.cores}))
    quotas = [rank.machine.quota_cores for rank in ranks if rank.machine.quota_cores is not None]
    return min([together, *quotas])


def _by(ranks: Sequence[RankFacts], key: Callable[[RankFacts], K]) -> dict[K, list[RankFacts]]:
    groups: dict[K, list[RankFacts]] = {}
    for rank in ranks:
        groups.setdefault(key(rank), []).append(rank)
    return groups
