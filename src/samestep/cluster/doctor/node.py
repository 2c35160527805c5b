"""One machine as one process sees it: versions, GPUs, cores, shared memory, limits."""

import contextlib
import hashlib
import os
import re
import shutil
import socket
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch as pytorch

import samestep as package
from samestep.base.machine import nvidia_smi, quota_cores, usable_cores
from samestep.base.run.directory import versions
from samestep.base.words import count
from samestep.cluster.doctor.findings import Check, Finding, graded, green, red, size_name, yellow
from samestep.cluster.doctor.rank_facts import Gpu, Machine, value_within

try:
    import resource
except ImportError:  # Windows has no such limits
    resource = None  # type: ignore[assignment]

SHM = Path("/dev/shm")  # noqa: S108 - only read
_RESOLVE_S = 1.5
_TRACKER = "api.wandb.ai"  # resolves wherever trackers can be reached

OLDEST_PYTHON, OLDEST_TORCH = (3, 11), (2, 11)
TRIED_TORCH = ("2.11.0", "2.12.1", "2.13.0", "2.14.1")
"""With which samestep's tests have run: docs/project/versions.md."""

SMALL_SHM_BYTES = 1 << 30  # enough for a few workers with batches of images
DOCKER_SHM_BYTES = 64 << 20  # a container's default; one batch of images can be more
FULL_SHM_FRACTION = 0.1
STALE_BYTES, STALE_S, NAMED_FILES = 1 << 20, 60.0, 3
"""Smaller files (semaphores) and younger ones do not count as stale."""
MUCH_USED_FRACTION = 0.1  # above this, a program uses a GPU's memory, not only the driver


def read_machine(
    recipe: Path | None = None,
    environment: Mapping[str, str] = os.environ,
    *,
    look_outside: bool = True,
) -> Machine:
    """Read the facts of this machine, in a few seconds at most."""
    installed, omp = versions(), environment.get("OMP_NUM_THREADS", "")
    shm = shutil.disk_usage(SHM) if SHM.is_dir() else None
    stale = stale_files() if look_outside else {}
    return Machine(
        host=environment.get("SLURMD_NODENAME") or socket.gethostname(),
        **{name: str(installed.get(name, "")) for name in ("python", "torch", "samestep", "cuda")},
        code=hash_of_code(),
        recipe=hash_of_recipe(recipe),
        nccl=_nccl(),
        driver=_driver(),
        gpus=_gpus(),
        num_gpus_in_node=len(list(Path("/proc/driver/nvidia/gpus").glob("*"))),
        machine_cores=os.cpu_count() or 1,
        cores=tuple(sorted(usable_cores())),
        omp_threads=int(omp) if omp.isdecimal() else None,
        quota_cores=quota_cores(),
        shm_bytes=shm.total if shm else None,
        shm_free_bytes=shm.free if shm else 0,
        shm_stale=tuple(stale),
        shm_stale_bytes=sum(stale.values()),
        open_files=_limit("RLIMIT_NOFILE"),
        processes=_limit("RLIMIT_NPROC"),
        locked_bytes=_limit("RLIMIT_MEMLOCK"),
        has_rdma=any(Path("/sys/class/infiniband").glob("*")),
        offline=_offline() if look_outside else None,
    )


def stale_files(
    folder: Path = SHM, processes: Path = Path("/proc"), now: float | None = None
) -> dict[str, int]:
    """Return this user's files that no process has open, as killed ranks leave, largest first."""
    now, sizes = now or time.time(), {}
    for path in folder.glob("*"):
        with contextlib.suppress(OSError):
            stat = path.lstat()
            is_old = now - max(stat.st_mtime, stat.st_ctime) > STALE_S
            is_ours = path.is_file() and stat.st_uid == os.getuid()
            if is_ours and is_old and stat.st_size >= STALE_BYTES:
                sizes[str(path)] = stat.st_size
    held: set[str] = set()
    for process in processes.glob("[0-9]*") if sizes else ():
        with contextlib.suppress(OSError):  # another user's process, or one that has ended
            held |= {os.readlink(link) for link in (process / "fd").iterdir()}  # noqa: PTH115
            lines = (process / "maps").read_text(errors="replace").splitlines()
            held |= {line.split(None, 5)[5] for line in lines if line.count("/") > 1}
    left = ((path, size) for path, size in sizes.items() if path not in held)
    return dict(sorted(left, key=lambda item: -item[1]))


def hash_of_code() -> str:
    """Return a hash of samestep's source files, to compare the copies of two nodes."""
    root = Path(package.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def hash_of_recipe(recipe: Path | None) -> str:
    """Return a hash of a recipe file, "missing", or an empty text if none was named."""
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
    if not pytorch.cuda.is_available():
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
    return next(iter(re.findall(r"\b\d+\.\d+(?:\.\d+)?\b", text)), "unknown")


def _gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that torch sees, with the memory in use by nvidia-smi.

    Torch knows that memory too, but only after opening each GPU, which takes memory on all.
    """
    if not pytorch.cuda.is_available():
        return ()
    used = {
        uuid.removeprefix("GPU-"): int(mib) * 2**20
        for uuid, mib in nvidia_smi("gpu", "uuid", "memory.used")
        if mib.isdecimal()
    }
    return tuple(
        Gpu(
            name=gpu.name,
            uuid=str(gpu.uuid),
            memory_bytes=gpu.total_memory,
            used_bytes=used.get(str(gpu.uuid), 0),
        )
        for gpu in map(pytorch.cuda.get_device_properties, range(pytorch.cuda.device_count()))
    )


def _offline() -> str:
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy")):
        return ""  # the proxy resolves names
    tables = {Path("/proc/net/route"): 1, Path("/proc/net/ipv6_route"): 0}
    texts = {path.read_text(): column for path, column in tables.items() if path.is_file()}
    routes = [(line.split(), n) for text, n in texts.items() for line in text.splitlines()]
    if texts and not any(set(row[n]) == {"0"} and row[-1] != "lo" for row, n in routes):
        return "no route leads out of this machine"
    address = value_within(_RESOLVE_S, lambda: str(socket.getaddrinfo(_TRACKER, 443)), "")
    return "" if address else f"{_TRACKER} does not resolve"


def python(machine: Machine) -> Finding:
    """Check that samestep supports this Python."""
    advice = "Create an environment with Python 3.11 or newer."
    return graded(machine.python, advice, red_if=_version(machine.python) < OLDEST_PYTHON)


def torch(machine: Machine) -> Finding:
    """Check that samestep supports this PyTorch, and tell whether its tests have run with it."""
    advice = "Install PyTorch 2.11 or newer: pip install --upgrade torch."
    release, newest = machine.torch.partition("+")[0], TRIED_TORCH[-1]
    tested = f"not tested; tested versions: {', '.join(TRIED_TORCH)}"
    if release in TRIED_TORCH:
        tested = "tested"
    elif _version(release, 3) > _version(newest, 3):
        tested = f"newer than the newest tested, {newest}"
    shown = f"{machine.torch}: {tested}"
    return graded(shown, advice, red_if=_version(machine.torch) < OLDEST_TORCH)


def samestep(machine: Machine) -> Finding:
    """Report samestep's version."""
    return green(f"{machine.samestep}, source {machine.code}")


def cuda(machine: Machine) -> Finding:
    """Check that PyTorch can use the driver and the GPUs."""
    if machine.num_gpus_in_node and not machine.cuda:
        return yellow(
            f"{machine.num_gpus_in_node} NVIDIA GPUs, but this PyTorch is built without CUDA",
            "To use them, install a CUDA build: https://pytorch.org/get-started/locally.",
        )
    if machine.driver and machine.cuda and not machine.gpus:
        return red(
            f"no GPU can be used: driver {machine.driver}, PyTorch for CUDA {machine.cuda}",
            "Run nvidia-smi. If it fails, this process was given no GPU (--gpus-per-node) or "
            "CUDA_VISIBLE_DEVICES hides them; otherwise the driver is too old: install a PyTorch "
            "built for an older CUDA.",
        )
    if not machine.gpus:
        return green("none: training runs on the CPU")
    return green(f"CUDA {machine.cuda}, driver {machine.driver}, NCCL {machine.nccl}")


def gpus(machine: Machine) -> Finding | None:
    """Check that the GPUs are of one kind and unused."""
    if not machine.gpus:
        return None
    counts = Counter(f"{g.name} ({g.memory_bytes / 2**30:.0f} GiB)" for g in machine.gpus)
    shown = ", ".join(f"{number} × {kind}" for kind, number in counts.items())
    if len(counts) > 1:
        return yellow(shown, "Every step waits for the slowest; use GPUs of one kind.")
    used = [g.used_bytes / g.memory_bytes for g in machine.gpus]
    if max(used) > MUCH_USED_FRACTION:
        return yellow(
            f"{shown}; {max(used):.0%} of GPU {used.index(max(used))} is in use",
            "Another program shares this GPU; nvidia-smi shows which.",
        )
    return green(shown)


def cores(machine: Machine) -> Finding:
    """Check how many of the machine's cores this process may use."""
    allowed, quota = len(machine.cores), machine.quota_cores
    limits = f"affinity {allowed}" + (f", quota {quota:.3g}" if quota is not None else "")
    usable = f"{min(allowed, quota or allowed):.3g} of the machine's {machine.machine_cores}"
    found = f"{usable} ({limits})"
    if quota is not None and quota < 1:
        advice = "Every step waits for a core; give the container or job more CPU."
        return red(f"{found}: less than one", advice)
    if quota is not None and quota < allowed:
        advice = f"Threads beyond the quota are throttled: train with --threads {int(quota)}."
        return yellow(f"{found}: PyTorch counts {allowed}", advice)
    return green(found)


def shared_memory(machine: Machine) -> Finding | None:
    """Check /dev/shm, through which loader workers and NCCL pass data."""
    if machine.shm_bytes is None:
        return None
    free, stale = machine.shm_free_bytes, machine.shm_stale
    found = f"{SHM} has {size_name(free)} free of {size_name(machine.shm_bytes)}"
    advice = "Give the container more: docker run --shm-size=8g, or --ipc=host."
    if machine.shm_bytes > SMALL_SHM_BYTES:
        advice = f"Something fills it: check ls -lS {SHM} and df {SHM}, and remove leftovers."
    if stale:
        size = size_name(machine.shm_stale_bytes)
        found += f"; {count(len(stale), 'file')} of yours ({size}) that no process has open"
        more = " …" if len(stale) > NAMED_FILES else ""
        advice = (
            "Dead processes left them. Unless another container of yours uses them: rm "
            f"{' '.join(stale[:NAMED_FILES])}{more}"
        )
    full = free < FULL_SHM_FRACTION * machine.shm_bytes
    return graded(
        found,
        advice,
        red_if=free <= DOCKER_SHM_BYTES,
        yellow_if=free < SMALL_SHM_BYTES or full or bool(stale),
    )


def open_files(machine: Machine) -> Finding:
    """Check the limit: loader workers and connections take several descriptors each."""
    advice = "Raise it before training: ulimit -n 65536 (in the job script)."
    return _at_most(machine.open_files, 1024, 256, advice)  # 1,024 is enough for some ten workers


def processes(machine: Machine) -> Finding:
    """Check the limit, which counts ranks, workers and their threads: tens of each rank."""
    advice = "Raise it: ulimit -u 65536; where that is refused, ask the administrators."
    return _at_most(machine.processes, 4096, 512, advice)


def locked_memory(machine: Machine) -> Finding:
    """Check the limit, which matters only for RDMA."""
    most = machine.locked_bytes
    shown = "no limit" if most is None else f"{size_name(most)} at most"
    return graded(
        f"{shown} ({'' if machine.has_rdma else 'no '}InfiniBand here)",
        "NCCL cannot register its buffers: ulimit -l unlimited, or in slurmd's unit "
        "LimitMEMLOCK=infinity.",
        red_if=machine.has_rdma and most is not None,
    )


def internet(machine: Machine) -> Finding | None:
    """Check that trackers and downloads can reach the internet; one rank per node tries."""
    if machine.offline is None:
        return None
    return graded(
        f"offline: {machine.offline}" if machine.offline else "external names resolve",
        "Run trackers offline (WANDB_MODE=offline), and download data sets on a node with a "
        "network: samestep data get.",
        yellow_if=bool(machine.offline),
    )


def _at_most(most: int | None, few: int, too_few: int, advice: str) -> Finding:
    if most is None:
        return green("no limit")
    return graded(f"{most:,} at most", advice, red_if=most < too_few, yellow_if=most < few)


def _version(text: str, numbers: int = 2) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:numbers])


CHECKS: list[Check[Machine]] = [
    *(python, torch, samestep, cuda, gpus, cores, shared_memory),
    *(open_files, processes, locked_memory, internet),
]
