"""Which rank of how many this process is, read from an environment mapping and nothing else.

Every launcher leaves its own variables; `detect_launch` turns them into one `Launch`.
"""

import itertools
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from samestep.base.errors import UserError

Environment = Mapping[str, str]
Launcher = Literal["torchrun", "srun", "openmpi", "pmi", "none"]

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29500  # PyTorch's own, where no job is named from which to derive one
DERIVED_PORTS = range(12000, 30000)  # below 32768, from where Linux hands out ports itself

# A launcher's names for the rank, the world size, the local rank and the local world size.
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
PMI = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
MPI_JOB_IDS = ("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", "SLURM_JOB_ID", "PBS_JOBID")

# What describes the step comes before what describes the job, which may be larger.
STEP_ID = ("SLURM_STEP_ID", "SLURM_STEPID")
NUM_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
NUM_NODES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")

# Slurm counts the steps that srun starts from 0 and keeps the highest numbers for its own.
MAX_SRUN_STEP = 0xFFFFFFF0
SLURM_OWN_STEPS = {
    4294967290: "the interactive shell",
    4294967291: "the sbatch script",
    4294967292: "a shell in the extern step",
}
SHELLS = frozenset({"bash", "sh", "zsh", "fish", "tcsh", "csh", "ksh", "dash"})

RANGE = "[0-9]+(?:-[0-9]+)?"
HOSTS = rf"(?:[^\[\],\s]|\[{RANGE}(?:,{RANGE})*\])+"
TASKS_ON_NODES = r"([0-9]+)(?:\(x([0-9]+)\))?"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One process's place among those that were started together."""

    launcher: Launcher = "none"
    """What started this process; `none` for a single process."""
    rank: int = 0
    local_rank: int = 0
    """The number of this process on its node; it picks the device."""
    world_size: int = 1
    local_world_size: int = 1
    """How many processes are on this node."""
    node: int = 0
    """The number of this node among all."""
    num_nodes: int = 1
    master_addr: str = LOOPBACK
    """The host on which rank 0 listens."""
    master_port: int = 0
    """The port on which rank 0 listens; 0 when there is one process."""
    note: str | None = None
    """One sentence for the user about what was found, where it may surprise."""


def detect_launch(environment: Environment) -> Launch:
    """Find out from the launchers' variables which rank of how many this process is."""
    # Slurm is last because mpirun starts its daemons with srun: on all nodes but the first, its
    # ranks inherit the variables of a step whose tasks are those daemons.
    launches = (detect(environment) for detect in (_torchrun, _mpi, _slurm))
    return next(filter(None, launches), Launch())


def binds_gpus(environment: Environment) -> bool:
    """Whether Slurm shows each task GPUs of its own (`--gpus-per-task`, `--gpu-bind`)."""
    bound = environment.get("SLURM_GPU_BIND_TYPE") or environment.get("SLURM_GPU_BIND") or "none"
    per_task = any(environment.get(f"SLURM_{n}") for n in ("GPUS_PER_TASK", "NTASKS_PER_GPU"))
    return per_task or "none" not in bound


def expand_node_list(node_list: str) -> list[str]:
    """Expand Slurm's short form of host names: `gpu[01-02],login` is gpu01, gpu02, login."""
    hosts: list[str] = []
    match = re.fullmatch(f"{HOSTS}(,{HOSTS})*", node_list)
    for entry in re.findall(HOSTS, node_list) if match else ():
        pieces = re.split(r"\[(.*?)\]", entry)  # at odd places: what stood in brackets
        choices = [_expand_ranges(p) if place % 2 else [p] for place, p in enumerate(pieces)]
        expanded = ["".join(parts) for parts in itertools.product(*choices)]
        match = match if expanded else None
        hosts += expanded
    if not match:
        raise UserError(
            f"The Slurm node list {node_list!r} cannot be read; "
            "it should look like gpu[001-003,7],login."
        )
    return hosts


def _expand_ranges(ranges: str) -> list[str]:
    """Return all numbers of `001-003,7`; none if a range runs backwards."""
    numbers: list[str] = []
    for item in ranges.split(","):
        first, _, last = item.partition("-")
        if not (span := range(int(first), int(last or first) + 1)):
            return []
        numbers += (f"{number:0{len(first)}d}" for number in span)
    return numbers


def _torchrun(environment: Environment) -> Launch | None:
    rank, world_size = environment.get("RANK"), environment.get("WORLD_SIZE")
    if not rank or not world_size:
        return None  # job scripts for srun often export only WORLD_SIZE
    if not environment.get("LOCAL_RANK"):
        raise UserError(
            f"RANK={rank} and WORLD_SIZE={world_size} are set, but not LOCAL_RANK, which chooses "
            "the device. Start with torchrun; or set LOCAL_RANK and LOCAL_WORLD_SIZE (0 and 1 for "
            "one process on each node); or, under srun or mpirun, unset RANK and WORLD_SIZE."
        )
    launch = _read_ranks(environment, "torchrun", TORCHRUN)
    if launch.world_size == 1:
        launch = replace(launch, note=_alone_among_others(environment))
    if not environment.get("GROUP_RANK") or not environment.get("GROUP_WORLD_SIZE"):
        return _with_master(environment, _fill_nodes_in_turn(launch))
    num_nodes = _number(environment, "GROUP_WORLD_SIZE", at_least=1)
    node = _number(environment, "GROUP_RANK", at_most=num_nodes - 1)
    return _with_master(environment, replace(launch, node=node, num_nodes=num_nodes))


def _alone_among_others(environment: Environment) -> str | None:
    """Return a note if one process is named, and srun or mpirun has started it with others."""
    names = ("SLURM_STEP_NUM_TASKS", OPEN_MPI[1], PMI[1])
    counts = ((name, environment.get(name, "")) for name in names)
    name, count = next(((n, c) for n, c in counts if c.isdecimal() and int(c) > 1), ("", ""))
    if not count:
        return None
    return (
        f"WORLD_SIZE=1, though {name}={count}: each of these {count} processes trains by itself. "
        "To train together, unset RANK and WORLD_SIZE; or, if torchrun has set them, give it "
        "--nnodes and --rdzv-endpoint."
    )


def _mpi(environment: Environment) -> Launch | None:
    launcher: Launcher = "openmpi"
    if not environment.get("OMPI_COMM_WORLD_RANK"):
        launcher = "pmi"
        # `srun --mpi=pmi2` sets PMI_* as well, but no local rank
        by_srun = not environment.get("MPI_LOCALRANKID") and _first_set(environment, STEP_ID)
        if by_srun or not environment.get("PMI_RANK"):
            return None
    launch = _read_ranks(environment, launcher, OPEN_MPI if launcher == "openmpi" else PMI)
    job = _first_set(environment, MPI_JOB_IDS)
    return _with_master(environment, _fill_nodes_in_turn(launch), job=job)


def _slurm(environment: Environment) -> Launch | None:
    job = _first_set(environment, ("SLURM_JOB_ID", "SLURM_JOBID"))
    if job is None:
        return None
    if shell := _shell_in_allocation(environment):
        return Launch(
            note=f"This is {shell} of Slurm job {job}, so samestep uses one process. To start one "
            "per task, type `srun samestep train …` (with --ntasks=N for N of them)."
        )
    num_nodes = _number(environment, *NUM_NODES, at_least=1)
    node = _number(environment, "SLURM_NODEID", at_most=num_nodes - 1)
    world_size = _number(environment, *NUM_TASKS, at_least=1)
    name, value = _required(environment, TASKS_PER_NODE)
    if not re.fullmatch(f"{TASKS_ON_NODES}(,{TASKS_ON_NODES})*", value):
        raise UserError(f"{name}={value} cannot be read; it should look like 4(x2),3.")
    counts: list[int] = []  # Slurm's short form: `4(x2),3` is 4, 4, 3
    for count, nodes in re.findall(TASKS_ON_NODES, value):
        counts += [int(count)] * int(nodes or 1)
    if node >= len(counts):
        raise UserError(f"{name}={value} has no entry for the node SLURM_NODEID={node}.")
    local_world_size = counts[node]
    launch = Launch(
        launcher="srun",
        rank=_number(environment, "SLURM_PROCID", at_most=world_size - 1),
        local_rank=_number(environment, "SLURM_LOCALID", at_most=local_world_size - 1),
        world_size=world_size,
        local_world_size=local_world_size,
        node=node,
        num_nodes=num_nodes,
    )
    first_host = expand_node_list(_required(environment, NODE_LISTS)[1])[0]
    return _with_master(environment, launch, first_host, job, _number(environment, *STEP_ID))


def _shell_in_allocation(environment: Environment) -> str | None:
    """Name the kind of shell, if it has an allocation's variables and is not a rank."""
    if _first_set(environment, STEP_ID) is None:
        return "the sbatch script" if environment.get("SLURM_PROCID") else "a shell"
    step = _number(environment, *STEP_ID)
    if step > MAX_SRUN_STEP:
        return SLURM_OWN_STEPS.get(step, "an internal step")
    # Every srun typed in a terminal inherits the terminal's variables, so they prove nothing when
    # it has many tasks; but the step of `srun --pty bash` is its job's first and names the job.
    if not _first_set(environment, ("SLURM_PTY_PORT", "SLURM_PTY_WIN_COL")):
        return None
    names_job = step == 0 and environment.get("SLURM_JOB_NAME") in SHELLS
    one_task = _number(environment, *NUM_TASKS, at_least=1) == 1
    return "a terminal step (inside it, srun needs --overlap)" if names_job or one_task else None


def _read_ranks(environment: Environment, launcher: Launcher, names: tuple[str, ...]) -> Launch:
    rank_name, world_size_name, local_rank_name, local_world_size_name = names
    world_size = _number(environment, world_size_name, at_least=1)
    rank = _number(environment, rank_name, at_most=world_size - 1)
    if world_size == 1:
        return Launch(launcher=launcher)  # PMI often says no more about a single process
    local_world_size = _number(environment, local_world_size_name, at_least=1, at_most=world_size)
    return Launch(
        launcher=launcher,
        rank=rank,
        local_rank=_number(environment, local_rank_name, at_most=local_world_size - 1),
        world_size=world_size,
        local_world_size=local_world_size,
    )


def _fill_nodes_in_turn(launch: Launch) -> Launch:
    """Number the nodes for a launcher that does not: each takes the next block of ranks."""
    num_nodes, left_over = divmod(launch.world_size, launch.local_world_size)
    if left_over or launch.rank % launch.local_world_size != launch.local_rank:
        raise UserError(
            f"Rank {launch.rank} of {launch.world_size} is local rank {launch.local_rank} of "
            f"{launch.local_world_size}, from which its node cannot be derived. Start the same "
            "number of processes on every node, one node after the other."
        )
    return replace(launch, node=launch.rank // launch.local_world_size, num_nodes=num_nodes)


def _with_master(
    environment: Environment,
    launch: Launch,
    first_host: str | None = None,
    job: str | None = None,
    step: int = 0,
) -> Launch:
    if launch.world_size == 1:
        return launch
    # On one node its name is not needed, and may not resolve.
    address = environment.get("MASTER_ADDR") or (first_host if launch.num_nodes > 1 else LOOPBACK)
    if address is None:
        raise UserError(
            f"{launch.launcher} started processes on {launch.num_nodes} nodes without naming the "
            "first. Export MASTER_ADDR (its host name) and MASTER_PORT (a free port on it)."
        )
    if environment.get("MASTER_PORT"):
        port = _number(environment, "MASTER_PORT", at_least=1, at_most=65535)
    elif job:  # steps of one job share a host, so they get neighbouring ports
        port = DERIVED_PORTS[(zlib.crc32(job.encode()) + step) % len(DERIVED_PORTS)]
    else:
        port = DEFAULT_PORT
    return replace(launch, master_addr=address, master_port=port)


def _first_set(environment: Environment, names: tuple[str, ...]) -> str | None:
    return next((environment[name] for name in names if environment.get(name)), None)


def _required(environment: Environment, names: tuple[str, ...]) -> tuple[str, str]:
    for name in names:
        if environment.get(name):
            return name, environment[name]
    raise UserError(
        f"{names[0]} is not set, but other variables of its launcher are. Start through the "
        "launcher, and pass on all of its variables."
    )


def _number(
    environment: Environment, *names: str, at_least: int = 0, at_most: int = 2**32 - 1
) -> int:
    name, value = _required(environment, names)
    if not re.fullmatch(r"[0-9]+", value) or not at_least <= int(value) <= at_most:
        raise UserError(
            f"{name}={value} should be a whole number from {at_least} to {at_most}, according to "
            "the other variables; unset the ones you exported by hand."
        )
    return int(value)
