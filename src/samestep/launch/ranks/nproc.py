"""How many ranks and loader processes this machine carries, and starting them for `--nproc`."""

import math
import os
from collections.abc import Callable
from typing import Any

from samestep.base import words
from samestep.base.errors import UserError
from samestep.base.flags import NumRanks
from samestep.base.machine import free_memory_bytes, quota_cores, usable_cores
from samestep.base.startup import PARENT
from samestep.launch.ranks.launch import detect_launch
from samestep.launch.ranks.process import MEMBER

MOST_PER_CORE = 4
RANK_BYTES = 220 << 20
"""Memory that a rank has for itself with a tiny model on the CPU; two of spiral's had 224 MiB."""
WORKER_BYTES = 13 << 20
"""Memory that a loader process has for itself; it shares most with its rank."""


def ranks_to_start(wanted: NumRanks, device: str = "auto", *, oversubscribe: bool = False) -> int:
    """Return the ranks of `--nproc`; auto: one per GPU, else one per core as memory allows."""
    if wanted != "auto":
        check_ranks(wanted, oversubscribe=oversubscribe)
        return wanted
    if device in ("auto", "cuda"):
        import torch  # noqa: PLC0415 - a number needs no torch

        if torch.cuda.is_available() and (gpus := torch.cuda.device_count()):
            return gpus
    return max(1, min(cores(), _that_fit(RANK_BYTES)))


def check_ranks(number: int, *, oversubscribe: bool = False, flag: str = "--nproc") -> None:
    """Check that this machine carries this many ranks."""
    if number < 1:
        raise UserError(f"{flag} is {number}; it must be 1 or more.")
    if not oversubscribe:
        _check(f"{flag} {number}", number, "ranks", RANK_BYTES, most=cores() * MOST_PER_CORE)


def check_workers(num_workers: int, num_ranks: int, num_cores: int) -> None:
    """Check that the cores and the free memory carry the loader processes of these ranks."""
    each = f" for each of {num_ranks} ranks" if num_ranks > 1 else ""
    flag, most = f"--num-workers {num_workers}{each}", num_cores * MOST_PER_CORE
    _check(flag, num_workers * num_ranks, "loader processes", WORKER_BYTES, most)


def cores() -> int:
    """Return how many cores this process may use, by its affinity and by its control groups."""
    number, quota = len(usable_cores()), quota_cores()
    return number if quota is None else min(number, max(1, math.ceil(quota)))


def _check(flag: str, number: int, kind: str, size: int, most: int) -> None:
    fit = _that_fit(size)
    why = ""
    if number > most:
        why = f"more than {MOST_PER_CORE} {kind} per core ({most // MOST_PER_CORE} usable here)"
    elif number > fit:
        need, free = (words.size(many * size) for many in (number, fit))
        why, most = f"{number} {kind} need at least {need} of memory, and {free} are free", fit
    if why:
        raise UserError(f"{flag}: {why}. Use at most {most}, or add --oversubscribe.")


def _that_fit(size: int) -> int:
    free = free_memory_bytes()
    return 2**30 if free is None else free // size


def start_nproc(
    nproc: NumRanks,
    arguments: list[str],
    task: str = "",
    *,
    device: str = "auto",
    oversubscribe: bool = False,
    elastic: Callable[[int], Any] | None = None,
) -> int | None:
    """Start the ranks of `--nproc`; return their exit code, or None where this process works."""
    if os.environ.get(PARENT) or os.environ.get(MEMBER):
        return None
    if elastic is not None:
        instead = "Leave --elastic out: this launcher stops all ranks when one fails."
        refuse_inside_launcher("--elastic", instead)
    if nproc == "auto" and detect_launch(os.environ).world_size > 1:
        return None
    if nproc not in (1, "auto"):
        refuse_inside_launcher(f"--nproc {nproc}", "Leave --nproc out.")
    number = 1 if nproc == 1 else ranks_to_start(nproc, device, oversubscribe=oversubscribe)
    if number == 1:
        if elastic is not None:
            raise UserError("--elastic needs several ranks: add --nproc N.", flags=["elastic"])
        return None
    from samestep.launch.ranks.start import start_ranks  # noqa: PLC0415 - imports the elastic agent

    return start_ranks(number, arguments, task, None if elastic is None else elastic(number))


def refuse_inside_launcher(command: str, instead: str) -> None:
    """Refuse to start ranks where a launcher has started this process among others."""
    launch = detect_launch(os.environ)
    if launch.world_size > 1:
        raise UserError(
            f"{command} starts ranks itself, but {launch.launcher} has already started "
            f"{launch.world_size}. {instead}",
            on_all_ranks=True,
        )
