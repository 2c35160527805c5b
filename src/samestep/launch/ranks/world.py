"""Which rank am I, on which device, with whom: the only module that talks to torch.distributed.

Everything else is handed a `World` and asks it. At world size 1 every collective returns its
input, so that one path of code serves a laptop and a cluster.
"""

import contextlib
import datetime as dt
import gc
import os
import pickle
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed import Store as _Store  # type: ignore[attr-defined]

from samestep.base.errors import UserError, listed
from samestep.base.settings import Backend, Device
from samestep.base.startup import PARENT, resume_collections
from samestep.launch.ranks.launch import Launch, binds_gpus, detect_launch

FEWER_RANKS = (
    "Start as many ranks as GPUs (--nproc, --ntasks-per-node), use --device cpu, or let ranks "
    "share a GPU with --oversubscribe."
)


def one_gpu_each(
    launch: Launch, environment: Mapping[str, str], *, oversubscribe: bool = False
) -> bool:
    """Return whether the one GPU that a rank sees is its own, as far as variables say.

    Slurm says so. Under other launchers CUDA_VISIBLE_DEVICES may be set per rank or once for all:
    `check_gpus` compares. Ranks that samestep starts all see what it sees.
    """
    chosen = environment.get("CUDA_VISIBLE_DEVICES") and not environment.get(PARENT)
    by_slurm = launch.launcher == "srun" and binds_gpus(environment)
    return by_slurm or (bool(chosen) and not oversubscribe)


def gpu_uuid(device: torch.device) -> str:
    """Return the UUID of a CUDA device; nothing for other devices."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def check_gpus(launch: Launch, uuid: str, store: Any) -> None:
    """Check that no two ranks compute on one GPU. All ranks call it, before they join."""
    size = launch.world_size
    store.set(f"gpu/{launch.rank}", f"{uuid} of node {launch.node} ({socket.gethostname()})")
    gpus = [store.get(f"gpu/{rank}").decode() for rank in range(size)]
    ranks: dict[str, list[int]] = {}
    for rank, gpu in enumerate(gpus):
        ranks.setdefault(gpu.partition(" (")[0], []).append(rank)
    sharing = max(ranks.values(), key=len)
    if len(sharing) == 1:
        return
    store.set(f"gpu/{launch.rank}/read", "1")
    if launch.rank == 0:  # whose process may serve the store, and ends now
        store.wait([f"gpu/{rank}/read" for rank in range(size)])
    several = listed([*map(str, sharing)], most=4)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
    raise UserError(
        f"Ranks {several} share one GPU: {gpus[sharing[0]]}. CUDA_VISIBLE_DEVICES is {visible} "
        f"here. {FEWER_RANKS}",
        on_all_ranks=True,
    )


T = TypeVar("T")

Store: TypeAlias = _Store

StoreTimeout: TypeAlias = dist.DistStoreError
"""A store has waited for a key in vain."""

GROUP_OF_ONE = "SAMESTEP_GROUP_OF_ONE"
"""Set to 1, a single process makes a process group too: a test of what connects ranks."""


@dataclass(frozen=True, kw_only=True)
class World(Launch):
    """One rank's place among all ranks of a run, its device, and the collectives."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str = "none"
    notes: tuple[str, ...] = ()
    """What the user should know of how this world was found, a sentence each."""
    virtual_ranks: int = 0
    """Fixed shares of each global batch that these ranks compute; 0: each rank has one share."""
    elastic: bool = False
    """Whether the others continue if one of these dies: each rank knows all that a step yields."""

    @property
    def num_parts(self) -> int:
        """The number of shares that a global batch and an evaluation are cut into."""
        return self.virtual_ranks or self.world_size

    @property
    def is_main(self) -> bool:
        """Whether this rank prints, logs and writes the shared files."""
        return self.rank == 0

    @property
    def connected(self) -> bool:
        """Whether there is a process group: with other ranks, or by `GROUP_OF_ONE` without any."""
        return self.world_size > 1 or self.backend != "none"

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.connected:
            dist.barrier()

    def reduce(self, values: Tensor, op: Literal["sum", "max"] = "sum") -> Tensor:
        """Return the sum (or maximum) of a tensor over all ranks, on every rank; input unchanged.

        Gloo reduces tensors on the CPU, even where NCCL connects the devices, so agreeing on a
        number never waits for the device.
        """
        if self.connected:
            values = values.clone()
            dist.all_reduce(values, op=dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX)
        return values

    def broadcast(self, value: T, source: int = 0) -> T:
        """Return one rank's value on every rank; it is pickled between our own processes."""
        box: list[Any] = [value]
        if self.connected:
            dist.broadcast_object_list(box, src=source, device=torch.device("cpu"))
        return box[0]  # type: ignore[no-any-return]

    def take_from_main(self, tensor: Tensor) -> None:
        """Overwrite a tensor with rank 0's, on every rank."""
        if self.connected:
            dist.broadcast(tensor, src=0)

    def add_up(self, tensor: Tensor) -> None:
        """Overwrite a tensor with its sum over all ranks: an all-reduce and nothing else."""
        if self.connected:
            dist.all_reduce(tensor)

    def begin_add_up(self, tensor: Tensor) -> Callable[[], object]:
        """Begin what `add_up` does, and return what waits for its end."""
        work = dist.all_reduce(tensor, async_op=True) if self.connected else None
        return work.wait if work else lambda: None

    def exchange(self, tensor: Tensor, partner: int) -> Tensor:
        """Return the tensor that another rank gives for this one; both call it, same shape."""
        received = torch.empty_like(tensor)
        send = dist.P2POp(dist.isend, tensor, partner)
        receive = dist.P2POp(dist.irecv, received, partner)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        return received

    def all_to_all_into(self, received: Tensor, sent: Tensor, counts: Sequence[int]) -> None:
        """Send each rank its shard of this rank's rows; take the same shard of everybody's rows.

        Shapes: received (sum of counts, shard), in rank order; sent (world size, rows of this rank,
        shard); counts has the rows of each rank.
        """
        dist.all_to_all_single(
            received,
            sent.view(-1, sent.shape[-1]),
            output_split_sizes=list(counts),
            input_split_sizes=[sent.shape[1]] * self.world_size,
        )

    def all_gather_into(self, gathered: Tensor, shard: Tensor) -> None:
        """Fill a tensor with the equal shards of all ranks, in rank order."""
        gather = getattr(dist, "all_gather_single", None)  # its name since torch 2.13
        (gather or dist.all_gather_into_tensor)(gathered, shard)

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in rank order, on every rank."""
        if not self.connected:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def gloo_group(self) -> Any:
        """Return a new group of all ranks, connected by Gloo, for a thread; None on one rank.

        All ranks call it. Collectives of two threads in one group could meet in different orders.
        """
        return dist.new_group(backend="gloo") if self.connected else None

    def on_main(self, function: Callable[[], T]) -> T:
        """Call a function on rank 0 and return its value, or raise its `UserError`, on every rank.

        This way a mistake that only rank 0 sees, such as a full disk, ends all ranks instead
        of leaving the others in a collective.
        """
        value, failure = _try(function) if self.is_main else (None, None)
        value, message = self.broadcast((value, None if failure is None else str(failure)))
        if message is not None:
            raise UserError(message, on_all_ranks=True) from failure
        return cast("T", value)

    def on_every(self, function: Callable[[], T]) -> T:
        """Call a function on every rank; a `UserError` on any of them is raised on all."""
        value, failure = _try(function)
        messages = self.gather(None if failure is None else str(failure))
        if failures := [(rank, text) for rank, text in enumerate(messages) if text]:
            rank, text = failures[0]
            of_rank = f"[rank {rank}] " if len(failures) < self.world_size else ""
            raise UserError(of_rank + text, on_all_ranks=True) from failure
        return cast("T", value)


def _try(function: Callable[[], T]) -> tuple[T | None, UserError | None]:
    try:
        return function(), None
    except UserError as error:
        return None, error


@contextlib.contextmanager
def as_if_alone() -> Iterator[None]:
    """Let code that asks for its rank get 0, and for the number of ranks 1, within this."""
    answers = {"get_rank": 0, "get_world_size": 1, "is_initialized": False}
    named = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    named |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1"}
    before = {name: os.environ[name] for name in named if name in os.environ}
    saved = [(m, name, getattr(m, name)) for m in (dist, dist.distributed_c10d) for name in answers]
    for module, name, _ in saved:
        setattr(module, name, lambda *_, answer=answers[name], **__: answer)
    os.environ.update({name: named[name] for name in before})
    try:
        yield
    finally:
        os.environ.update(before)
        for module, name, function in saved:
            setattr(module, name, function)


def _check_known(name: str, wanted: str, choices: Sequence[str]) -> None:
    """Refuse a word that a call in Python gave, and that no flag may be."""
    if wanted not in choices:
        names = ", ".join(map(repr, choices))
        raise UserError(f"{name}={wanted!r}: it must be one of {names}.", flags=[name])


def choose_device(
    wanted: Device,
    local_rank: int,
    *,
    cuda: int | None = None,
    mps: bool | None = None,
    one_each: bool = False,
    oversubscribe: bool = False,
) -> torch.device:
    """Return this rank's device: `cuda:LOCAL_RANK`, MPS or the CPU; "auto" takes the best one.

    `cuda` (the number of devices) and `mps` come from torch if not given. `one_each`: the one GPU
    that a rank sees is its own. `oversubscribe`: ranks beyond the number of GPUs share them.
    """
    _check_known("device", wanted, get_args(Device))
    if cuda is None:
        cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    has_mps = torch.backends.mps.is_available() if mps is None else mps
    if wanted == "cuda" and not cuda:
        built = "none is visible" if torch.version.cuda else "this PyTorch is built without CUDA"
        raise UserError(
            f"--device cuda: there is no CUDA device here ({built}; CUDA_VISIBLE_DEVICES="
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}). Use --device auto or cpu, or a "
            "CUDA build of PyTorch on a machine with a GPU."
        )
    if wanted == "mps" and not has_mps:
        raise UserError("--device mps: there is no Apple GPU here. Use --device auto or cpu.")
    if wanted == "cuda" or (wanted == "auto" and cuda):
        if one_each and cuda == 1:
            return torch.device("cuda", 0)
        if local_rank >= cuda and not oversubscribe:
            raise UserError(f"Local rank {local_rank} has no GPU: {cuda} visible. {FEWER_RANKS}")
        return torch.device("cuda", local_rank % cuda)
    return torch.device("mps" if wanted == "mps" or (wanted == "auto" and has_mps) else "cpu")


def choose_backend(wanted: Backend, device: torch.device, platform: str = sys.platform) -> str:
    """Return the backend that connects the ranks: NCCL for CUDA on Linux, else Gloo."""
    _check_known("backend", wanted, get_args(Backend))
    possible = platform.startswith("linux") and device.type == "cuda"
    if wanted == "nccl" and not possible:
        raise UserError(
            f"--backend nccl connects CUDA devices on Linux; this rank has {device.type} on "
            f"{platform}. Use --backend auto or gloo."
        )
    return "nccl" if possible and wanted != "gloo" else "gloo"


def find_world(
    device: Device = "auto",
    backend: Backend = "auto",
    environment: Mapping[str, str] = os.environ,
    *,
    oversubscribe: bool = False,
) -> World:
    """Return the world that the launcher's variables describe, not joined yet."""
    # On several threads, a process's first `exp`, `sqrt` … is rarely off by up to 2e-4: so one
    # comes before them on one thread (findings/first-exp-of-a-process.sh).
    torch.ones(8).sqrt()
    launch = detect_launch(environment)
    one_each = one_gpu_each(launch, environment, oversubscribe=oversubscribe)
    chosen = choose_device(
        device, launch.local_rank, one_each=one_each, oversubscribe=oversubscribe
    )
    notes = [launch.note] if launch.note else []
    gpus = torch.cuda.device_count() if chosen.type == "cuda" and not one_each else 0
    if oversubscribe and 0 < gpus < launch.local_world_size and backend != "nccl":
        notes.append(f"{launch.local_world_size} ranks share {gpus} GPUs, connected with Gloo.")
        backend = "gloo"  # NCCL refuses two ranks on one GPU
    connects = choose_backend(backend, chosen)  # also for one rank: what cannot be is refused
    if chosen.type == "mps" and launch.world_size > 1:
        notes.append("All ranks share the one Apple GPU of this machine, which gains no speed.")
        if device == "auto":  # and Gloo cannot reduce what lies on it
            notes.append("The ranks train on the CPU; to use the Apple GPU, add --device mps.")
            chosen = torch.device("cpu")
    if launch.world_size == 1 and environment.get(GROUP_OF_ONE) != "1":
        connects = "none"
    return World(**vars(launch), device=chosen, backend=connects, notes=tuple(notes))


def agent_serves() -> bool:
    """Whether torchrun's agent listens behind the master address, so that rank 0 must not."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


_num_opened: Counter[tuple[str, int, int]] = Counter()
"""Address, port, rank → how many times this process has opened the store there."""

_joined: list[Store] = []
"""The store of the last `join`. It keeps rank 0's server alive: ranks that join again before rank 0
would otherwise connect to a server that is about to close."""


def open_store(launch: Launch, timeout_s: float) -> Store:
    """Return the key-value store at the master address, which rank 0, or an agent, serves.

    Ranks can use it before they join, and find out who is missing. It raises a RuntimeError if it
    could not be served, or not be reached in time.
    """
    by_agent = agent_serves()
    store = TCPStore(
        launch.master_addr,
        launch.master_port,
        world_size=launch.world_size,
        is_master=launch.rank == 0 and not by_agent,
        timeout=dt.timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=True,  # this process may serve others there, too, as a script's own ranks
    )
    # An agent's store outlives the ranks, and holds the addresses of those that it started before.
    # A store of our own has only its own ranks, and agents that came later count fewer attempts.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if by_agent else "0"
    # All ranks of a script that trains twice join twice: each time has keys of its own.
    place = (launch.master_addr, launch.master_port, launch.rank)
    _num_opened[place] += 1
    return PrefixStore(f"samestep/{attempt}/{_num_opened[place]}", store)


def join(world: World, timeout_s: float = 600.0, store: Store | None = None) -> None:
    """Connect this rank with the others; with one rank there is nothing to do.

    A collective waits `timeout_s` seconds for the slowest rank. `store` is the one that
    `open_store` returned, if already open.
    """
    resume_collections()  # all that is imported for good is here by now
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    if not world.connected:
        return
    if world.world_size == 1:
        connect(world, dist.HashStore(), timeout_s)  # type: ignore[attr-defined]
        return
    choose_interface(world)
    os.environ["MASTER_ADDR"] = world.master_addr
    os.environ["MASTER_PORT"] = str(world.master_port)
    try:
        store = store or open_store(world, timeout_s)
        _joined[:] = [store]
        if world.backend == "nccl":  # which would fail on it, in words of its own
            check_gpus(world, gpu_uuid(world.device), store)
        connect(world, store, timeout_s)
    except (dist.DistError, RuntimeError, socket.gaierror) as error:
        reason, place = str(error).splitlines()[0], f"{world.master_addr}:{world.master_port}"
        if "EADDRINUSE" in str(error) or "already in use" in str(error):
            raise UserError(
                f"The port of {place} is taken, perhaps by another job. Set MASTER_PORT to a free "
                "port on every rank and start again."
            ) from error
        raise UserError(
            f"Rank {world.rank} of {world.world_size} could not meet the others at {place}: "
            f"{reason}. Check that every rank was started, that no firewall blocks the port, and "
            "that all nodes are in one network (GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name its "
            "interface); `samestep doctor`, started the same way, looks for the reason."
        ) from error


def connect(world: World, store: Any, timeout_s: float) -> None:
    """Make the process group of a world: tensors go by its backend, agreements by Gloo."""
    nccl = world.backend == "nccl"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if nccl else "gloo",
        store=store,
        rank=world.rank,
        world_size=world.world_size,
        timeout=dt.timedelta(seconds=timeout_s),
        device_id=world.device if nccl else None,
    )


def choose_interface(world: World) -> None:
    """Let Gloo meet the other nodes through the network that leads to them, unless one is named."""
    from samestep.launch.ranks import address  # noqa: PLC0415 - of several ranks

    if named := os.environ.get("GLOO_SOCKET_IFNAME"):
        address.check_gloo_interfaces(named)
    if world.num_nodes > 1:
        master = address.resolve_master(world.master_addr)  # PyTorch would ask for minutes
        own = address.resolve(socket.gethostname())
        if not named and (way := address.interface_towards(master, own)):
            os.environ["GLOO_SOCKET_IFNAME"] = way


def leave(world: World) -> None:
    """Disconnect after success. Free the wrapped model first; a failed rank must not call this.

    Without the barrier a rank can exit while others still talk to it; a failed rank that waits here
    would hold up the others for ever.
    """
    if world.connected:
        gc.collect()  # a DDP model is part of a cycle, and must go before the group does
        dist.barrier()
        dist.destroy_process_group()


def in_process_group() -> bool:
    """Whether this process is connected to others already, by whatever has made the group."""
    return dist.is_available() and dist.is_initialized()


_FAILURE = "failure"
"""In the store: what the rank that failed first says of it."""


def publish_failure(message: str) -> None:
    """Tell the other ranks why this one fails, unless another has told before."""
    with contextlib.suppress(Exception):  # rank 0, which may serve the store, is gone
        for store in _joined if in_process_group() else ():
            store.compare_set(_FAILURE, "", message)


def first_failure() -> str:
    """Return the message of the rank that failed first; "" if none did."""
    with contextlib.suppress(Exception):
        for store in _joined:
            if store.check([_FAILURE]):
                return str(store.get(_FAILURE).decode())
    return ""


def abandon(code: int) -> None:
    """End this process at once, after a failure, if it is connected to others.

    Python's usual end meets the group's threads still waiting for the others: it aborted 2 of 30
    failed ranks with a message from C++ and the wrong exit code.
    """
    if in_process_group():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@dataclass(frozen=True, kw_only=True)
class ImaginedWorld(World):
    """A stand-in world of any size in one process, for `explain`: all ranks say the same."""

    @property
    def connected(self) -> bool:
        """Never: a collective returns its input."""
        return False

    def gather(self, value: T) -> list[T]:
        """Return this rank's value for every rank, each its own copy, as if it had been sent."""
        sent = pickle.dumps(value)
        return [value, *(pickle.loads(sent) for _ in range(1, self.world_size))]  # noqa: S301
