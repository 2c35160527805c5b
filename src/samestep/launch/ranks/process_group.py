"""The process group that a training loop of the user's joins: `samestep.dist`."""

import warnings
from typing import Literal, NoReturn

from torch import Tensor

from samestep.base.errors import AlreadyTold, UserError
from samestep.base.settings import Backend, Device
from samestep.launch.ranks.process import RankLog, report
from samestep.launch.ranks.world import World, abandon, find_world, join, leave

ALONE = World()
"""Before setup, or without it."""
_current = ALONE


def setup_distributed(
    device: Device = "auto", backend: Backend = "auto", timeout_s: float = 600.0
) -> tuple[int, int, int]:
    """Join the other ranks that the launcher started; with one rank, do nothing.

    The device of this rank is `cuda:LOCAL_RANK` where there are GPUs, and it is made current.

    Args:
        device: the device wanted; "auto" takes the best one here.
        backend: what connects the ranks; "auto" is NCCL for CUDA on Linux, else Gloo.
        timeout_s: seconds that a collective waits for the slowest rank.

    Returns:
        (rank, local_rank, world_size); (0, 0, 1) for a single process.

    Raises:
        UserError: the launcher's variables are wrong, the device is absent, or the ranks cannot
            meet.
    """
    global _current  # noqa: PLW0603 - a process belongs to one group
    world = find_world(device, backend)
    join(world, timeout_s)
    _current = world
    for note in world.notes if world.is_main else ():
        warnings.warn(note, stacklevel=2)
    return world.rank, world.local_rank, world.world_size


def current_world() -> World:
    """Return the world that `setup_distributed` joined; before it, or after `cleanup`, no ranks."""
    return _current


def is_main_process() -> bool:
    """Whether this is rank 0: only it prints, logs and writes shared files."""
    return _current.is_main


def reduce_tensor(tensor: Tensor, op: Literal["sum", "mean", "max"]) -> Tensor:
    """Return a tensor's sum, mean or maximum over all ranks, on every rank.

    The mean gives each rank the same weight, so a mean of means is wrong where ranks have unequal
    numbers of samples: reduce sums and counts with "sum" there, and divide once.

    Args:
        tensor: any shape, the same on every rank; it is not changed.
        op: what to compute.
    """
    if op == "mean":
        return _current.reduce(tensor) / _current.world_size
    return _current.reduce(tensor, op)


def barrier() -> None:
    """Wait until every rank is here."""
    _current.barrier()


def cleanup() -> None:
    """Leave the other ranks, after success. Delete a DDP model first."""
    global _current  # noqa: PLW0603
    leave(_current)
    _current = ALONE


def end_failed(error: BaseException, log: RankLog, *, connected: bool) -> None:
    """End this process after a failure.

    Return where Python should show its own traceback: one process, and no mistake of the user.
    """
    if not connected:
        cleanup()  # a notebook runs on
    if isinstance(error, UserError) or (connected and isinstance(error, Exception)):
        end_reported(report(error, log))
    if connected:
        code = error.code if isinstance(error, AlreadyTold) else 1
        abandon(code if isinstance(code, int) else 1)


def end_reported(code: int) -> NoReturn:
    """End this process with an exit code after a failure that was reported."""
    abandon(code)  # connected still: this rank or another has failed
    raise AlreadyTold(code)
