"""What each rank knows of itself, what all ranks measured, and how long a fact may take to read.

The facts travel between ranks as JSON, which another version of samestep can read, unlike a
pickle. An empty text means "none"; None means "unknown", or "no limit" for a limit.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

from samestep.base.flags import InShell
from samestep.base.settings import Backend, Device
from samestep.launch.ranks.launch import Launch

T = TypeVar("T")

_TIMEOUT_THREAD = "samestep-doctor-timeout"


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """What to look at, and for how long."""

    recipe: Annotated[Path | None, InShell("[RECIPE.py]", positional=True)] = None
    """A recipe file, which must be the same for every rank."""
    run_dir: Annotated[Path, InShell("DIR")] = Path("runs")
    """Folder for the runs; name a run's directory to use its settings and checkpoint size, too."""
    num_workers: int | None = None
    """Loader workers per rank in training; by default those of the run, or 0."""
    timeout_s: float = 30.0
    """Seconds to wait for the other ranks."""
    budget_s: float = 20.0
    """Seconds that measuring the all-reduce may take."""
    device: Device = "auto"
    """Device for the training; auto takes the best one of this machine."""
    backend: Backend = "auto"
    """Communication between the ranks; auto: nccl for CUDA devices on Linux, else gloo."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU that this process may use."""

    name: str
    uuid: str
    memory_bytes: int
    used_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class GpuHealth:
    """What a rank's GPU was measured to do, and what nvidia-smi says of it."""

    bf16_tflop_s: float
    """Of a large matrix product, in 10¹² operations/s; `peak_tflop_s` is from the data sheet."""
    peak_tflop_s: float | None = None
    to_gpu_gb_s: float
    """From pinned memory, in 10⁹ bytes per second; `link_gb_s` is what the link carries at most."""
    from_gpu_gb_s: float
    link_gb_s: float | None = None
    clock_mhz: int | None = None
    most_mhz: int | None = None
    slowed_by: tuple[str, ...] = ()
    """Why its clocks are below what they could be, where something is wrong."""
    uncorrected: int | None = None
    """Errors of its memory since the driver was loaded that could not be corrected."""
    others: tuple[int, ...] = ()  # other processes that compute on it


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine as one process sees it."""

    host: str  # its name; in a Slurm job Slurm's name of the node
    python: str
    torch: str
    samestep: str
    code: str  # hash of samestep's source files; `recipe` is that of the recipe file, or "missing"
    recipe: str = ""
    cuda: str = ""
    nccl: str = ""
    driver: str = ""
    gpus: tuple[Gpu, ...] = ()
    num_gpus_in_node: int = 0
    """The NVIDIA GPUs that the kernel knows, whether this process may use them or not."""
    machine_cores: int
    cores: tuple[int, ...]
    omp_threads: int | None = None  # OMP_NUM_THREADS; None if it is unset or not a number
    quota_cores: float | None = None  # CPU quota of the control group, in cores
    shm_bytes: int | None = None
    shm_free_bytes: int = 0
    shm_stale: tuple[str, ...] = ()
    """Files of this user in /dev/shm that no process has open, the largest first."""
    shm_stale_bytes: int = 0
    open_files: int | None = None
    processes: int | None = None  # limit of processes and threads of this user
    locked_bytes: int | None = None
    has_rdma: bool = False
    offline: str | None = None
    """Why the internet cannot be reached; empty if it can, None if this rank did not try."""


@dataclass(frozen=True, kw_only=True)
class Address:
    """A rank's place in the network."""

    place: str  # identifies the host, or the container if it has a network of its own
    master: str = ""
    local: str = ""  # this host's address on the way to the master
    interface: str = ""
    own: str = ""  # what this host's own name resolves to here; Gloo announces it to the others
    chosen: str = ""  # the interface that samestep tells Gloo to use; empty if Gloo chooses
    gloo_interface: str = ""
    nccl_interface: str = ""


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A run directory, or the folder in which it will be made."""

    path: str
    problem: str = ""  # why it cannot be written; empty if it can
    free_bytes: int | None = None
    checkpoint_bytes: int | None = None  # size of the run's newest checkpoint
    num_checkpoints: int | None = None
    """How many the run will keep, including the one that is being written."""
    num_workers: int = 0
    epoch_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class SlurmTask:
    """A process's place in a Slurm job, by the variables that Slurm sets."""

    job: str
    in_step: bool  # whether srun started this process, or its launcher, as a task
    in_script: bool = False
    num_tasks: int | None = None
    job_nodes: int | None = None
    hosts: tuple[str, ...] = ()
    tasks_per_node: int | None = None
    most_step_tasks_on_node: int | None = None
    gpus_on_node: int | None = None
    gpu_bind: str = ""
    """The option that limits each task to its own GPUs; empty if it sees all of its node."""


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """A job as Slurm's controller describes it."""

    is_batch: bool
    requeue: bool
    time_limit: str  # as Slurm writes it: 1-02:03:04, or UNLIMITED
    signal: str | None = None
    """The script's --signal; empty if it has none, None if the script cannot be read."""
    traps_signal: bool = False


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """One rank: its place, its machine, what it sees."""

    launch: Launch
    machine: Machine
    address: Address
    folder: Folder | None = None  # read by the first rank of each node
    slurm: SlurmTask | None = None
    job: SlurmJob | None = None  # read by rank 0, after the roll call
    device: str = "cpu"
    device_uuid: str = ""
    device_problem: str = ""
    gpu: GpuHealth | None = None  # of its device, if that is a GPU
    elastic: bool = False  # whether torchrun started it
    num_workers: int = 0

    @property
    def label(self) -> str:
        """The rank's name in messages."""
        return f"rank {self.launch.rank} on {self.machine.host}"


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """One size of the all-reduce."""

    bytes: int
    latency_us: float
    bus_gb_s: float  # bus bandwidth in 10⁹ bytes per second


@dataclass(frozen=True, kw_only=True)
class Link:
    """Two nodes, by their first ranks, that sent to each other at the same time."""

    first: int
    second: int
    gb_s: float  # 10⁹ bytes per second in each direction


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """What was measured between the ranks."""

    clock_s: tuple[float, ...]  # how far each rank's clock is ahead of rank 0's
    unshared: tuple[str, ...] | None
    """Per rank, why it does not see rank 0's file; None if rank 0 could not write one."""
    matmul_s: tuple[float, ...]
    links: tuple[Link, ...]
    all_reduce: tuple[AllReduce, ...]  # growing sizes, as many as the time budget allowed


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The ranks that came, and what they measured if all could connect."""

    ranks: tuple[RankFacts, ...]
    measured: Measurements | None = None

    @property
    def nodes(self) -> list[list[RankFacts]]:
        """The ranks of each node, in the order of the nodes."""
        numbers = sorted({rank.launch.node for rank in self.ranks})
        return [[rank for rank in self.ranks if rank.launch.node == n] for n in numbers]

    @property
    def first_ranks(self) -> tuple[int, ...]:
        """The first rank of each node, in the order of the nodes."""
        return tuple(ranks[0].launch.rank for ranks in self.nodes)

    @property
    def hosts(self) -> dict[str, list[RankFacts]]:
        """The ranks of each host. A test cluster may have several nodes on one host."""
        hosts: dict[str, list[RankFacts]] = {}
        for rank in self.ranks:
            hosts.setdefault(rank.address.place, []).append(rank)
        return hosts

    @property
    def spans_hosts(self) -> bool:
        """Whether the ranks are on more than one host, or in several networks of one."""
        return len(self.hosts) > 1


def cores_together(ranks: Sequence[RankFacts]) -> float:
    """Return the cores that the ranks of one host may use together."""
    # srun may give each task its own cores; a quota usually belongs to one container, for all.
    together = float(len({core for rank in ranks for core in rank.machine.cores}))
    quotas = [rank.machine.quota_cores for rank in ranks if rank.machine.quota_cores is not None]
    return min([together, *quotas])


def call_within(seconds: float, function: Callable[[], T]) -> T:
    """Return a function's value or raise its error; raise TimeoutError if it takes too long.

    A hanging system call cannot be interrupted: its thread is left to end with the process.
    """
    answer: Future[T] = Future()

    def call() -> None:
        try:
            answer.set_result(function())
        except Exception as error:
            answer.set_exception(error)

    thread = threading.Thread(target=call, name=_TIMEOUT_THREAD, daemon=True)
    thread.start()
    thread.join(seconds)
    if not answer.done():
        raise TimeoutError(f"no answer within {seconds:g} s")
    return answer.result()


def value_within(seconds: float, function: Callable[[], T], otherwise: T) -> T:
    """Return a function's value, or `otherwise` if it raises or takes too long."""
    try:
        return call_within(seconds, function)
    except Exception:
        return otherwise


def still_waiting() -> bool:
    """Whether a call that timed out is still running."""
    return any(thread.name == _TIMEOUT_THREAD for thread in threading.enumerate())
