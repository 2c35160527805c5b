"""Checks of one machine."""

import re

from samestep.doctor.check import Check, Finding, green, red, yellow
from samestep.doctor.facts.machine import Machine

OLDEST_PYTHON, OLDEST_TORCH = (3, 11), (2, 11)

SMALL_SHM_BYTES = 1 << 30
"""A few workers with batches of images fill less than this."""
DOCKER_SHM_BYTES = 64 << 20
"""What a container gets by default: one batch of images can be more."""
FEW_FILES, TOO_FEW_FILES = 1024, 256
"""1,024 is the default of most systems, and enough for some ten workers."""
FEW_PROCESSES, TOO_FEW_PROCESSES = 4096, 512
"""Every thread counts, and each rank of PyTorch has tens of them."""
MUCH_USED_FRACTION = 0.1
"""More than this of a GPU's memory is taken by a program, not by the driver."""


def python(machine: Machine) -> Finding:
    """Whether samestep runs on this Python."""
    if _version(machine.python) < OLDEST_PYTHON:
        return red(machine.python, "Make an environment with Python 3.11 or newer.")
    return green(machine.python)


def torch(machine: Machine) -> Finding:
    """Whether samestep runs on this PyTorch."""
    if _version(machine.torch) < OLDEST_TORCH:
        return red(machine.torch, "Install PyTorch 2.11 or newer: pip install --upgrade torch.")
    return green(machine.torch)


def samestep(machine: Machine) -> Finding:
    """Which samestep this is."""
    return green(f"{machine.samestep}, source {machine.code}")


def cuda(machine: Machine) -> Finding:
    """Whether PyTorch, the driver and the GPUs go together."""
    if machine.num_gpus_in_node and not machine.cuda:
        return yellow(
            f"{machine.num_gpus_in_node} NVIDIA GPUs, but this PyTorch is built without CUDA",
            "To use them, install a CUDA build: https://pytorch.org/get-started/locally.",
        )
    if machine.driver and machine.cuda and not machine.gpus:
        return red(
            f"no GPU can be used: driver {machine.driver}, PyTorch for CUDA {machine.cuda}",
            "Run nvidia-smi. If it fails, no GPU was given to this process (--gpus-per-node) or "
            "CUDA_VISIBLE_DEVICES hides them; else the driver is too old for this CUDA: install "
            "a PyTorch built for an older one.",
        )
    if not machine.gpus:
        return green("none: training is on the CPU")
    return green(f"CUDA {machine.cuda}, driver {machine.driver}, NCCL {machine.nccl}")


def gpus(machine: Machine) -> Finding | None:
    """Which GPUs there are, and whether others use them."""
    if not machine.gpus:
        return None
    kinds = {gpu.name: gpu for gpu in machine.gpus}
    shown = ", ".join(
        f"{sum(g.name == name for g in machine.gpus)} × {name} ({gpu.memory_bytes / 2**30:.0f} GiB)"
        for name, gpu in kinds.items()
    )
    if len(kinds) > 1:
        return yellow(shown, "Every step waits for the slowest; use GPUs of one kind.")
    used = [g.used_bytes / g.memory_bytes for g in machine.gpus]
    if max(used) > MUCH_USED_FRACTION:
        return yellow(
            f"{shown}; {max(used):.0%} of GPU {used.index(max(used))} is in use",
            "See with nvidia-smi whose it is: another program shares this GPU.",
        )
    return green(shown)


def cores(machine: Machine) -> Finding:
    """How many cores this process may really use, whatever the machine has."""
    allowed, quota = len(machine.cores), machine.quota_cores
    limits = f"affinity {allowed}" + (f", quota {quota:.3g}" if quota is not None else "")
    found = f"{usable(machine):.3g} of the machine's {machine.machine_cores} ({limits})"
    if quota is not None and quota < 1:
        return red(
            f"{found}: less than one",
            "Every step waits for the scheduler; give the container or job more CPU.",
        )
    if quota is not None and quota < allowed:
        return yellow(
            f"{found}: PyTorch counts {allowed}",
            f"Threads beyond the quota are stopped in turn: train with --threads {int(quota)}.",
        )
    return green(found)


def shared_memory(machine: Machine) -> Finding | None:
    """Loader workers, and NCCL within a node, pass data through /dev/shm."""
    if machine.shm_bytes is None:
        return None
    found = f"/dev/shm has {_size(machine.shm_free_bytes)} free of {_size(machine.shm_bytes)}"  # noqa: S108
    advice = "Give the container more: docker run --shm-size=8g, or --ipc=host."
    if machine.shm_bytes > SMALL_SHM_BYTES:
        advice = "Something fills it: see ls -l /dev/shm, and remove what died."
    if machine.shm_free_bytes <= DOCKER_SHM_BYTES:
        return red(found, advice)
    if machine.shm_free_bytes < SMALL_SHM_BYTES:
        return yellow(found, advice)
    return green(found)


def open_files(machine: Machine) -> Finding:
    """Each loader worker and each connection takes several file descriptors."""
    advice = "Raise it before training: ulimit -n 65536 (in the job script)."
    return _at_most(machine.open_files, FEW_FILES, TOO_FEW_FILES, advice)


def processes(machine: Machine) -> Finding:
    """Ranks, workers and their threads are processes to this limit."""
    advice = "Raise it: ulimit -u 65536; where that is refused, ask the administrators."
    return _at_most(machine.processes, FEW_PROCESSES, TOO_FEW_PROCESSES, advice)


def locked_memory(machine: Machine) -> Finding:
    """Cards that read memory by themselves need it locked; nothing else here does."""
    most = machine.locked_bytes
    shown = "no limit" if most is None else f"{_size(most)} at most"
    if not machine.has_rdma:
        return green(f"{shown} (no InfiniBand here)")
    if most is not None:
        return red(
            f"{shown}, and there is InfiniBand",
            "NCCL cannot register its buffers: ulimit -l unlimited, or in slurmd's unit "
            "LimitMEMLOCK=infinity.",
        )
    return green(shown)


def internet(machine: Machine) -> Finding | None:
    """Whether trackers and downloads can reach the world; one rank of each node tries."""
    if machine.offline is None:
        return None
    if machine.offline:
        return yellow(
            f"offline: {machine.offline}",
            "Trackers must work offline (WANDB_MODE=offline); fetch data sets where there is a "
            "network: samestep data get.",
        )
    return green("names outside resolve")


CHECKS: list[Check[Machine]] = [
    *(python, torch, samestep, cuda, gpus, cores, shared_memory),
    *(open_files, processes, locked_memory, internet),
]


def usable(machine: Machine) -> float:
    """Return the cores that this process can keep busy."""
    return min(len(machine.cores), machine.quota_cores or len(machine.cores))


def _at_most(most: int | None, few: int, too_few: int, advice: str) -> Finding:
    if most is None:
        return green("no limit")
    found = f"{most:,} at most"
    if most < few:
        return red(found, advice) if most < too_few else yellow(found, advice)
    return green(found)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.3g} MiB"
