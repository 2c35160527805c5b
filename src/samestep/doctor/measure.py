"""Measurements that need all ranks: each is bounded in time, and rank 0 decides for all."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from samestep.ranks.world import World

ALL_REDUCE_BYTES = (32, 1 << 10, 1 << 15, 1 << 20, 1 << 24, 1 << 26, 1 << 28)
LINK_BYTES, LINK_TRIAL_BYTES = 1 << 20, 1 << 16

MEASURED_ROUNDS = 20
_PER_SIZE_S = 1.0
_PER_LINK_S = 1.0
_CLOCK_ROUNDS = 5
_MATMUL_S = 0.3


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """One size of the all-reduce."""

    bytes: int
    latency_us: float
    """Median time of one all-reduce, in microseconds."""
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
class Measured:
    """What was measured between the ranks."""

    clock_s: tuple[float, ...]
    """How far each rank's clock is ahead of rank 0's."""
    unshared: tuple[str, ...] | None
    """Of each rank, why it does not see rank 0's file; None if there was none to see."""
    matmul_s: tuple[float, ...]
    """Each rank's time for the same product of matrices."""
    links: tuple[Link, ...]
    all_reduce: tuple[AllReduce, ...]
    skipped_bytes: int | None
    """The first size that had no time left."""


def bus_bandwidth(num_bytes: int, seconds: float, world_size: int) -> float:
    """Return the bus bandwidth of an all-reduce in GB/s: 2 (n - 1) / n × bytes / time.

    It is comparable with the speed of the hardware whatever the number of ranks
    (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
    """
    return 2 * (world_size - 1) / world_size * num_bytes / seconds / 1e9


def clocks(world: World) -> tuple[float, ...]:
    """Return how far each rank's clock is ahead of rank 0's, in seconds.

    All read it as they come out of a barrier; of several rounds the smallest difference is the
    nearest to the truth, since waiting for a core only adds to it.
    """
    best: list[float] = [float("inf")] * world.world_size
    for _ in range(_CLOCK_ROUNDS):
        world.barrier()
        read = world.gather(time.time())
        best = [min(b, t - read[0], key=abs) for b, t in zip(best, read, strict=True)]
    return tuple(best)


def products(world: World) -> tuple[float, ...]:
    """Return each rank's median time for the same product of matrices, in seconds."""
    size = 2048 if world.device.type == "cuda" else 384
    matrix = torch.ones(size, size, device=world.device)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as many threads as cores on every rank would measure each other
    try:
        _timed(world, lambda: matrix @ matrix)
        world.barrier()
        times: list[float] = []
        while sum(times) < _MATMUL_S or len(times) < 5:
            times.append(_timed(world, lambda: matrix @ matrix))
    finally:
        torch.set_num_threads(threads)
    return tuple(world.gather(statistics.median(times)))


def ring(first_ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Pair the first rank of each node with that of the next, and the last with the first."""
    pairs = list(zip(first_ranks, [*first_ranks[1:], *first_ranks[:1]], strict=True))
    return pairs if len(pairs) > 2 else pairs[: len(pairs) - 1]


def link(world: World, first: int, second: int) -> Link:
    """Measure the link between two ranks while all others wait, lest a slow one hides."""
    speed = 0.0
    if world.rank in (first, second):
        speed = _speed(world, second if world.rank == first else first)
    return Link(first=first, second=second, gb_s=world.gather(speed)[first])


def _speed(world: World, partner: int) -> float:
    """Return the speed of one link in GB/s, after a trial that tells how often it may be used."""
    # Gloo adds up what lies on a GPU, but sends from the CPU alone.
    device = world.device if world.backend == "nccl" else torch.device("cpu")
    trial, block = (
        torch.zeros(size, dtype=torch.uint8, device=device)
        for size in (LINK_TRIAL_BYTES, LINK_BYTES)
    )
    world.exchange(trial, partner)  # connects
    seconds = _timed(world, lambda: world.exchange(trial, partner))
    affordable = int(_PER_LINK_S / (seconds * LINK_BYTES / LINK_TRIAL_BYTES))
    mine = torch.tensor([min(5, max(1, affordable))], device=device)
    rounds = min(int(mine), int(world.exchange(mine, partner)))
    times = [_timed(world, lambda: world.exchange(block, partner)) for _ in range(rounds)]
    return LINK_BYTES / statistics.median(times) / 1e9


def all_reduce(world: World, budget_s: float) -> tuple[tuple[AllReduce, ...], int | None]:
    """Time the all-reduce over growing sizes until a budget is spent.

    Args:
        world: this rank.
        budget_s: seconds that all sizes together may take; a size whose predicted time is beyond
            it is not begun.

    Returns:
        What was measured, and the first size that was skipped, if any.
    """
    started = time.perf_counter()
    measured: list[AllReduce] = []
    seconds = 0.0  # the prediction: time grows with the size at most in proportion
    previous = ALL_REDUCE_BYTES[0]
    for num_bytes in ALL_REDUCE_BYTES:
        seconds *= num_bytes / previous
        left = budget_s - (time.perf_counter() - started)
        rounds = world.broadcast(rounds_within(seconds, left))
        if not rounds:
            return tuple(measured), num_bytes
        tensor = torch.zeros(num_bytes // 4, device=world.device)
        times = _reduce_often(world, tensor, rounds)
        seconds, previous = statistics.median(times), num_bytes
        measured.append(
            AllReduce(
                bytes=num_bytes,
                latency_us=seconds * 1e6,
                bus_gb_s=bus_bandwidth(num_bytes, seconds, world.world_size),
            )
        )
    return tuple(measured), None


def rounds_within(seconds: float, left: float) -> int:
    """Return how often to time a size; 0 if once, after one to warm up, is already too much."""
    if 2 * seconds > left:
        return 0
    return max(1, min(MEASURED_ROUNDS, int(min(left, _PER_SIZE_S) / max(seconds, 1e-9)) - 1))


def _reduce_often(world: World, tensor: Tensor, rounds: int) -> list[float]:
    _timed(world, lambda: world.add_up(tensor))
    return [_timed(world, lambda: world.add_up(tensor)) for _ in range(rounds)]


def _timed(world: World, function: Callable[[], object]) -> float:
    """Return the seconds that a function takes, the device's work included."""
    _synchronise(world)
    started = time.perf_counter()
    function()
    _synchronise(world)
    return time.perf_counter() - started


def _synchronise(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
