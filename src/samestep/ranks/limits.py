"""How many processes this machine carries: ranks, and the loader processes beside them."""

import math
import os
from collections.abc import Mapping
from typing import Literal

from samestep.errors import UserError
from samestep.machine import free_memory_bytes, quota_cores, usable_cores

MOST_PER_CORE = 4
RANK_BYTES = 220 << 20
"""Memory that a rank has for itself with a tiny model on the CPU; two of spiral's had 224 MiB."""
WORKER_BYTES = 13 << 20
"""The same of a loader process, which shares most of its memory with its rank."""

NumRanks = int | Literal["auto"]


def ranks_to_start(wanted: NumRanks, device: str = "auto", *, oversubscribe: bool = False) -> int:
    """Return how many ranks `--nproc` is to start.

    "auto" is a rank for each GPU; without one, a rank for each core, as memory allows.

    Raises:
        UserError: there can be no such number, or the machine does not carry it.
    """
    if wanted == "auto":
        return _gpus(device) or max(1, min(cores(), _that_fit(RANK_BYTES)))
    check_ranks(wanted, oversubscribe=oversubscribe)
    return wanted


def check_ranks(number: int, *, oversubscribe: bool = False, flag: str = "--nproc") -> None:
    """Check that this machine carries so many ranks.

    Raises:
        UserError: it does not, or the number is not positive.
    """
    if number < 1:
        raise UserError(f"{flag} is {number}; it must be 1 or more.")
    if not oversubscribe:
        _check(f"{flag} {number}", number, "ranks", RANK_BYTES, most=cores() * MOST_PER_CORE)


def check_workers(num_workers: int, num_ranks: int, num_cores: int) -> None:
    """Check that some cores, and this machine's memory, carry the loader processes of their ranks.

    Raises:
        UserError: they do not.
    """
    what = f"--num-workers {num_workers}"
    if num_ranks > 1:
        what += f" for each of {num_ranks} ranks"
    number = num_workers * num_ranks
    _check(what, number, "loader processes", WORKER_BYTES, most=num_cores * MOST_PER_CORE)


def cores() -> int:
    """Return how many cores this process may use, by its affinity and by its control groups."""
    number, quota = len(usable_cores()), quota_cores()
    return number if quota is None else min(number, max(1, math.ceil(quota)))


def _check(what: str, number: int, kind: str, size: int, most: int) -> None:
    """Check a number of processes against their most per core, and against memory."""
    if number > most:
        raise UserError(
            f"{what}: more than {MOST_PER_CORE} {kind} per core, with {most // MOST_PER_CORE} "
            f"usable here. Take at most {most}, or insist with --oversubscribe."
        )
    if number > _that_fit(size):
        raise UserError(
            f"{what}: {number} {kind} need at least {number * size / 2**30:.1f} GiB of memory, and "
            f"{_that_fit(size) * size / 2**30:.1f} GiB are free. Take at most "
            f"{_that_fit(size)}, or insist with --oversubscribe."
        )


def _that_fit(size: int) -> int:
    free = free_memory_bytes()
    return 2**30 if free is None else free // size


def _gpus(device: str) -> int:
    if device not in ("auto", "cuda"):
        return 0
    import torch  # noqa: PLC0415 - a number needs no torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


THREADS_WISHED = "SAMESTEP_OMP_NUM_THREADS"
"""Set, to the user's OMP_NUM_THREADS, in ranks that samestep starts: it gives them one of 1."""


def threads_wished(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of threads that the user asked for by OMP_NUM_THREADS, if any.

    torchrun sets it to 1 where it starts several ranks, so a 1 is no wish there.
    """
    value = environment.get(THREADS_WISHED, environment.get("OMP_NUM_THREADS", ""))
    first = value.split(",")[0].strip()
    by_torchrun = THREADS_WISHED not in environment and "TORCHELASTIC_RUN_ID" in environment
    if not first.isdecimal() or int(first) < 1 or (by_torchrun and value == "1"):
        return None
    return int(first)
