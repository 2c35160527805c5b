"""One machine as one process sees it: versions, GPUs, cores, memory for workers, limits."""

import csv
import hashlib
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

import samestep
from samestep.doctor.bounded import within
from samestep.machine import quota_cores, usable_cores
from samestep.run.environment import versions

try:
    import resource
except ImportError:  # Windows has no such limits
    resource = None  # type: ignore[assignment]

_NVIDIA_SMI_S = 10.0
_RESOLVE_S = 1.5
_TRACKER = "api.wandb.ai"  # a name that resolves wherever trackers can be reached


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU that this process may use."""

    name: str
    uuid: str
    memory_bytes: int
    used_bytes: int = 0
    """In use by other processes."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine as one process sees it."""

    host: str
    """Its name; in a Slurm job as Slurm calls it."""
    python: str
    torch: str
    samestep: str
    code: str
    """Hash of samestep's source files."""
    recipe: str = ""
    """Hash of the recipe file; "missing", or empty if none was named."""
    cuda: str = ""
    """The CUDA version that torch was built for; empty for a build without."""
    nccl: str = ""
    driver: str = ""
    """NVIDIA's driver; empty where there is none."""
    gpus: tuple[Gpu, ...] = ()
    """The GPUs that torch can use."""
    num_gpus_in_node: int = 0
    """The NVIDIA GPUs that the kernel knows, whether this process may use them or not."""
    machine_cores: int
    cores: tuple[int, ...]
    """The cores that this process may run on."""
    quota_cores: float | None = None
    """Cores' worth of time that the control group gives in all; None for no limit."""
    shm_bytes: int | None = None
    """Size of /dev/shm; None where there is none."""
    shm_free_bytes: int = 0
    open_files: int | None = None
    """Limit of open files of a process; None for no limit."""
    processes: int | None = None
    """Limit of processes and threads of this user; None for no limit."""
    locked_bytes: int | None = None
    """Limit of locked memory; None for no limit."""
    has_rdma: bool = False
    """Whether there is InfiniBand, or another card that reads memory by itself."""
    offline: str | None = None
    """Why nothing outside can be reached; empty if it can, None if it was not tried."""


def read_machine(
    recipe: Path | None = None,
    *,
    look_outside: bool = True,
    environment: Mapping[str, str] = os.environ,
) -> Machine:
    """Read the facts of this machine; a few seconds at most."""
    found = versions()
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None  # noqa: S108
    return Machine(
        host=environment.get("SLURMD_NODENAME") or socket.gethostname(),
        python=found["python"],
        torch=str(found["torch"]),  # torch's own kind of string
        samestep=found["samestep"],
        code=hash_of_code(),
        recipe=hash_of_recipe(recipe),
        cuda=found.get("cuda", ""),
        nccl=_nccl(),
        driver=_driver(),
        gpus=_gpus(),
        num_gpus_in_node=len(list(Path("/proc/driver/nvidia/gpus").glob("*"))),
        machine_cores=os.cpu_count() or 1,
        cores=tuple(sorted(usable_cores())),
        quota_cores=quota_cores(),
        shm_bytes=shm.total if shm else None,
        shm_free_bytes=shm.free if shm else 0,
        open_files=_limit("RLIMIT_NOFILE"),
        processes=_limit("RLIMIT_NPROC"),
        locked_bytes=_limit("RLIMIT_MEMLOCK"),
        has_rdma=any(Path("/sys/class/infiniband").glob("*")),
        offline=_offline() if look_outside else None,
    )


def hash_of_code() -> str:
    """Return a hash of samestep's own source files, by which two nodes' copies are compared."""
    root = Path(samestep.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def hash_of_recipe(recipe: Path | None) -> str:
    """Return a hash of a recipe file, "missing", or nothing if none was named."""
    if recipe is None:
        return ""
    try:
        return hashlib.sha256(recipe.read_bytes()).hexdigest()[:12]
    except OSError:
        return "missing"


def _limit(name: str) -> int | None:
    if resource is None or not hasattr(resource, name):
        return None
    soft, _hard = resource.getrlimit(getattr(resource, name))
    return None if soft == resource.RLIM_INFINITY else soft


def _nccl() -> str:
    if not torch.cuda.is_available():
        return ""
    from torch.cuda import nccl  # noqa: PLC0415 - fails to import in builds without CUDA

    try:
        return ".".join(map(str, nccl.version()))  # type: ignore[no-untyped-call]
    except AttributeError:
        return ""  # on Windows torch has CUDA without NCCL


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    match = re.search(r"\b\d+\.\d+(?:\.\d+)?\b", text)
    return match[0] if match else "unknown"


def _gpus() -> tuple[Gpu, ...]:
    """Ask torch which GPUs there are, and nvidia-smi how much of them others use.

    Torch could say that too, but only by opening each GPU, which takes memory on all of them.
    """
    if not torch.cuda.is_available():
        return ()
    used = _used_bytes()
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        uuid = str(properties.uuid)
        gpus.append(
            Gpu(
                name=properties.name,
                uuid=uuid,
                memory_bytes=properties.total_memory,
                used_bytes=used.get(uuid, 0),
            )
        )
    return tuple(gpus)


def _used_bytes() -> dict[str, int]:
    query = ["nvidia-smi", "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            query, capture_output=True, text=True, check=True, timeout=_NVIDIA_SMI_S
        )
        rows = list(csv.reader(done.stdout.splitlines(), skipinitialspace=True))
        return {uuid.removeprefix("GPU-"): int(mib) * 2**20 for uuid, mib in rows}
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}  # no nvidia-smi, or a GPU that does not tell


def _offline() -> str:
    """Say why nothing outside can be reached, in less than two seconds."""
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy")):
        return ""  # names are resolved by the proxy
    if Path("/proc/net/route").is_file() and not _has_default_route():
        return "no route leads out of this machine"
    if not within(_RESOLVE_S, lambda: bool(socket.getaddrinfo(_TRACKER, 443)), otherwise=False):
        return f"{_TRACKER} does not resolve"
    return ""


def _has_default_route() -> bool:
    tables = {"/proc/net/route": 1, "/proc/net/ipv6_route": 0}
    rows = [
        (line.split()[column], line.split()[-1])
        for path, column in tables.items()
        if Path(path).is_file()
        for line in Path(path).read_text().splitlines()
    ]
    return any(set(target) == {"0"} and interface != "lo" for target, interface in rows)
