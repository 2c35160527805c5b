"""Clocks, computation, links and the all-reduce: measured in bounded time, then checked."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from samestep.cluster.doctor.findings import Finding, graded, green, red, size_name, yellow
from samestep.cluster.doctor.rank_facts import Allocation, AllReduce, Link, cores_together
from samestep.launch.ranks.world import World

ALL_REDUCE_BYTES = (32, 1 << 10, 1 << 15, 1 << 20, 1 << 24, 1 << 26, 1 << 28)
LINK_BYTES, LINK_TRIAL_BYTES = 1 << 20, 1 << 16

MEASURED_ROUNDS = 20
_PER_SIZE_S, _PER_LINK_S, _MATMUL_S = 1.0, 1.0, 0.3
_CLOCK_ROUNDS = 5
CLOCK_YELLOW_S, CLOCK_RED_S = 1.0, 30.0
"""Above the first, logs of nodes cannot be compared; above the second, files of other nodes are in
the future, and tickets and certificates fail."""
SLOW_RANK_YELLOW, SLOW_RANK_RED = 1.5, 3.0  # times the median: every step waits for the slowest
SLOW_LINK = 3.0  # times slower than the median link
YELLOW_GB_S, RED_GB_S = 0.5, 0.05
"""Between hosts: half of what 10 Gbit and 1 Gbit Ethernet carry, in 10⁹ bytes per second."""
SLOW_LATENCY_US = 20_000.0  # between hosts: 100 times Ethernet's
JUDGED_BYTES = 1 << 20  # smaller all-reduces measure latency, not bandwidth

_CABLE = (
    "Set the fast interface on every node (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME); if that is not "
    "enough, ask the administrators to check the link."
)


def bus_bandwidth(num_bytes: int, seconds: float, world_size: int) -> float:
    """Return the bus bandwidth of an all-reduce in GB/s, independent of the number of ranks.

    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    return 2 * (world_size - 1) / world_size * num_bytes / seconds / 1e9


def measure_clocks(world: World) -> tuple[float, ...]:
    """Return the seconds that each rank's clock is ahead of rank 0's: the least after barriers."""
    best = [float("inf")] * world.world_size
    for _ in range(_CLOCK_ROUNDS):
        world.barrier()
        read = world.gather(time.time())
        best = [min(b, t - read[0], key=abs) for b, t in zip(best, read, strict=True)]
    return tuple(best)


def time_products(world: World) -> tuple[float, ...]:
    """Return each rank's median seconds for the same matrix product."""
    size = 2048 if world.device.type == "cuda" else 384
    matrix = torch.ones(size, size, device=world.device)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # else ranks on one host would slow each other down
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


def measure_link(world: World, first: int, second: int) -> Link:
    """Measure the link between two ranks while all others are quiet."""
    partner = {first: second, second: first}.get(world.rank)
    speed = 0.0 if partner is None else _link_speed(world, partner)
    return Link(first=first, second=second, gb_s=world.gather(speed)[first])


def _link_speed(world: World, partner: int) -> float:
    """Return the speed of one link in GB/s; a small trial first limits the number of rounds."""
    # Gloo reduces tensors on a GPU, but sends only from the CPU.
    device = world.device if world.backend == "nccl" else torch.device("cpu")
    block = torch.zeros(LINK_BYTES, dtype=torch.uint8, device=device)
    trial = block[:LINK_TRIAL_BYTES].clone()
    world.exchange(trial, partner)  # connects
    seconds = _timed(world, lambda: world.exchange(trial, partner))
    affordable = int(_PER_LINK_S / (seconds * LINK_BYTES / LINK_TRIAL_BYTES))
    mine = torch.tensor([min(5, max(1, affordable))], device=device)
    rounds = min(int(mine), int(world.exchange(mine, partner)))
    times = [_timed(world, lambda: world.exchange(block, partner)) for _ in range(rounds)]
    return LINK_BYTES / statistics.median(times) / 1e9


def time_all_reduce(world: World, budget_s: float) -> tuple[AllReduce, ...]:
    """Time the all-reduce of growing sizes; stop before the first that would exceed the budget."""
    started = time.perf_counter()
    measured: list[AllReduce] = []
    seconds = 0.0  # predicted time: at most proportional to the size
    previous = ALL_REDUCE_BYTES[0]
    for num_bytes in ALL_REDUCE_BYTES:
        seconds *= num_bytes / previous
        left = budget_s - (time.perf_counter() - started)
        rounds = world.broadcast(rounds_within(seconds, left))
        if not rounds:
            break
        tensor = torch.zeros(num_bytes // 4, device=world.device)
        reduce = partial(world.add_up, tensor)
        _timed(world, reduce)
        times = [_timed(world, reduce) for _ in range(rounds)]
        seconds, previous = statistics.median(times), num_bytes
        speed = bus_bandwidth(num_bytes, seconds, world.world_size)
        measured.append(AllReduce(bytes=num_bytes, latency_us=seconds * 1e6, bus_gb_s=speed))
    return tuple(measured)


def rounds_within(seconds: float, left: float) -> int:
    """Return the rounds to time a size; 0 if a warm-up and one round take too long."""
    if 2 * seconds > left:
        return 0
    return max(1, min(MEASURED_ROUNDS, int(min(left, _PER_SIZE_S) / max(seconds, 1e-9)) - 1))


def _timed(world: World, function: Callable[[], object]) -> float:

    def now() -> float:
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        return time.perf_counter()

    started = now()
    function()
    return now() - started


def clock(allocation: Allocation) -> Finding | None:
    """Check that the clocks of the nodes agree."""
    if allocation.measured is None:
        return None
    rank, offset = max(enumerate(allocation.measured.clock_s), key=lambda item: abs(item[1]))
    if (size := abs(offset)) <= CLOCK_YELLOW_S:
        return green(f"all within {max(size * 1e3, 1):.0f} ms of rank 0's")
    return (red if size > CLOCK_RED_S else yellow)(
        f"{allocation.ranks[rank].label} is {size:,.1f} s {'ahead' if offset > 0 else 'behind'}",
        "Synchronise its clock with a time server; chronyc tracking shows the state.",
    )


def compute(allocation: Allocation) -> Finding | None:
    """Check that no rank is slower than the others at the same matrix product."""
    if allocation.measured is None:
        return None
    times = allocation.measured.matmul_s
    rank = max(range(len(times)), key=times.__getitem__)
    ratio = times[rank] / statistics.median(times)
    slowest = allocation.ranks[rank]
    host = allocation.hosts[slowest.address.place]
    crowded = cores_together(host) < len(host)  # ranks take turns, so times mean little
    return graded(
        f"slowest is {slowest.label}: {times[rank] * 1e3:.3g} ms, {ratio:.2f} × the median",
        "Check what else runs there (top, nvidia-smi) and whether it throttles (nvidia-smi -q -d "
        "PERFORMANCE), or exclude the node: #SBATCH --exclude.",
        red_if=ratio > SLOW_RANK_RED and not crowded,
        yellow_if=ratio > SLOW_RANK_YELLOW,
    )


def links(allocation: Allocation) -> Finding | None:
    """Check that no link between two nodes is slow, absolutely or relative to the others."""
    if allocation.measured is None or not allocation.measured.links:
        return None
    measured = allocation.measured.links
    slowest = min(measured, key=lambda link: link.gb_s)
    median = statistics.median(link.gb_s for link in measured)
    ends = [allocation.ranks[slowest.first], allocation.ranks[slowest.second]]
    names = " – ".join(f"{r.machine.host} (node {r.launch.node})" for r in ends)
    text = f"{names}: {speed_name(slowest.gb_s)}"
    if len(measured) > 1:
        text = f"slowest is {text}, median {speed_name(median)}"
    apart = ends[0].address.place != ends[1].address.place
    if apart and slowest.gb_s < RED_GB_S:
        return red(f"{text}; less than half of 1 Gbit Ethernet", _CABLE)
    if slowest.gb_s * SLOW_LINK < median:
        advice = f"Every step waits for it. {_CABLE} Or exclude a node: #SBATCH --exclude."
        return yellow(text, advice)
    if apart and slowest.gb_s < YELLOW_GB_S:
        return yellow(f"{text}; less than half of 10 Gbit Ethernet", _CABLE)
    return green(text)


def all_reduce(allocation: Allocation) -> Finding | None:
    """Check the speed of the all-reduce; judged between hosts only."""
    measured = allocation.measured
    if measured is None:
        return None
    if not measured.all_reduce:
        return red("not even 32 B within the time budget", "Allow more time: --budget-s 60.")
    first, last = measured.all_reduce[0], measured.all_reduce[-1]
    best = max(measured.all_reduce, key=lambda size: size.bus_gb_s)
    all_sizes = last.bytes == ALL_REDUCE_BYTES[-1]
    until = "" if all_sizes else f" (up to {size_name(last.bytes)} in the time given)"
    found = (
        f"{first.latency_us:,.0f} µs for {size_name(first.bytes)}, bus bandwidth "
        f"{speed_name(best.bus_gb_s)} at {size_name(best.bytes)}{until}"
    )
    if not allocation.spans_hosts:
        return green(found)
    if last.bytes < JUDGED_BYTES or best.bus_gb_s < RED_GB_S:
        return red(f"{found}; less than half of 1 Gbit Ethernet", _CABLE)
    if best.bus_gb_s < YELLOW_GB_S or first.latency_us > SLOW_LATENCY_US:
        return yellow(f"{found}; a slow network", _CABLE)
    return green(found)


def speed_name(gb_s: float) -> str:
    """Return a speed in GB/s, small ones in MB/s."""
    return f"{gb_s:.3g} GB/s" if gb_s >= 0.1 else f"{gb_s * 1e3:.3g} MB/s"
