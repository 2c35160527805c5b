"""Checks of what lies between the ranks: names, interfaces, clocks, files, speed."""

import statistics
from collections import Counter

from samestep.doctor.check import Check, Finding, green, red, yellow
from samestep.doctor.checks.ranks import Allocation, cores_together
from samestep.ranks.address import is_loopback

CLOCK_YELLOW_S, CLOCK_RED_S = 1.0, 30.0
"""Beyond the first, logs of nodes cannot be laid side by side; beyond the second, files of other
nodes lie in the future, and tickets and certificates fail."""
SLOW_RANK_YELLOW, SLOW_RANK_RED = 1.5, 3.0
"""Times the median: every step waits for the slowest."""
SLOW_LINK = 3.0
"""Times slower than the median link."""
YELLOW_GB_S, RED_GB_S = 0.5, 0.05
"""Between hosts: half of what 10 Gbit and 1 Gbit Ethernet can carry, in 10⁹ bytes a second."""
SLOW_LATENCY_US = 20_000.0
"""Between hosts: a hundred times what Ethernet takes."""
JUDGED_BYTES = 1 << 20
"""Smaller all-reduces are a matter of latency, not of bandwidth."""

_CABLE = (
    "Name the fast interface on every node (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME); then ask "
    "the administrators to look at the link."
)


def interface(allocation: Allocation) -> Finding | None:
    """Which interface carries the traffic to rank 0."""
    ranks = allocation.ranks
    if len(ranks) == 1:
        return None
    home = ranks[0].address
    away = [rank for rank in ranks if rank.address.place != home.place]
    inside = [rank for rank in away if is_loopback(rank.address.local)]
    forced = {
        f"{name}={value}"
        for rank in ranks
        for name, value in (
            ("GLOO_SOCKET_IFNAME", rank.address.gloo_interface),
            ("NCCL_SOCKET_IFNAME", rank.address.nccl_interface),
        )
        if value
    }
    if inside:
        return red(
            f"{inside[0].label} reaches rank 0 by its own loopback interface",
            "MASTER_ADDR must be a name or address of rank 0's host that means the same on all "
            "nodes, not localhost.",
        )
    # Rank 0's own host reaches itself by loopback, whatever the others take.
    names = Counter(rank.address.interface or rank.address.local for rank in away or ranks)
    found = ", ".join([*names, *sorted(forced)])
    if not away:
        return green(f"{found}: all ranks are on one host")
    if len(names) > 1:
        return yellow(
            f"{found}: not the same on all nodes",
            "Make sure that all are in one network; NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME "
            "choose.",
        )
    return green(found)


def announced_address(allocation: Allocation) -> Finding | None:
    """Gloo tells the others the address that a host's own name resolves to there."""
    if not allocation.spans_hosts:
        return None
    wrong = [
        rank
        for rank in allocation.ranks
        if rank.address.gloo_interface == "lo"
        or (not rank.address.gloo_interface and not _reachable(rank.address.own))
    ]
    if not wrong:
        return green("every host's own name resolves to an address that others can reach")
    rank = next((r for r in wrong if not r.address.chosen or r.address.gloo_interface), wrong[0])
    name = rank.address.interface if rank.address.interface not in ("", "lo") else "eth0"
    resolves = f"resolves to {rank.address.own} there" if rank.address.own else "does not resolve"
    why = "has GLOO_SOCKET_IFNAME=lo" if rank.address.gloo_interface else resolves
    if rank.address.chosen and not rank.address.gloo_interface:
        return yellow(
            f"{rank.machine.host} {why}; samestep names Gloo the interface {rank.address.chosen}",
            f"For other programs set GLOO_SOCKET_IFNAME={rank.address.chosen}, or mend /etc/hosts.",
        )
    return red(
        f"{rank.machine.host} {why}: others cannot reach Gloo by it",
        f"Set GLOO_SOCKET_IFNAME={name} (the interface between the nodes) for every rank, or "
        "mend /etc/hosts.",
    )


def clock(allocation: Allocation) -> Finding | None:
    """Whether the clocks of the nodes agree."""
    if allocation.measured is None:
        return None
    offsets = allocation.measured.clock_s
    rank, offset = max(enumerate(offsets), key=lambda item: abs(item[1]))
    size = abs(offset)
    if size <= CLOCK_YELLOW_S:
        return green(f"all within {max(size * 1e3, 1):.0f} ms of rank 0's")
    found = f"{allocation.ranks[rank].label} is {size:,.1f} s {'ahead' if offset > 0 else 'behind'}"
    finding = red if size > CLOCK_RED_S else yellow
    return finding(found, "Have its clock set by a time server: chronyc tracking shows its state.")


def shared_folder(allocation: Allocation) -> Finding | None:
    """Whether all ranks see the same run directory."""
    if allocation.measured is None or allocation.measured.unshared is None:
        return None
    blind = [(r, why) for r, why in enumerate(allocation.measured.unshared) if why]
    folder = allocation.ranks[0].folder
    assert folder is not None, "rank 0 is the first of its node"
    if blind:
        rank, why = blind[0]
        more = f" ({len(blind)} ranks in all)" if len(blind) > 1 else ""
        return red(
            f"rank 0 wrote a file for {folder.path}; {allocation.ranks[rank].label} {why}{more}",
            "Give --run-dir as an absolute path on a file system that all nodes share.",
        )
    return green("all ranks see the same")


def compute(allocation: Allocation) -> Finding | None:
    """Whether one rank is slower than the others at the same product of matrices."""
    if allocation.measured is None:
        return None
    times = allocation.measured.matmul_s
    median = statistics.median(times)
    rank = max(range(len(times)), key=times.__getitem__)
    ratio = times[rank] / median
    label = allocation.ranks[rank].label
    found = f"slowest is {label}: {times[rank] * 1e3:.3g} ms, {ratio:.2f} × the median"
    advice = (
        "See what else runs there (top, nvidia-smi) and whether it throttles (nvidia-smi -q -d "
        "PERFORMANCE); leave the node out: #SBATCH --exclude."
    )
    host = allocation.hosts[allocation.ranks[rank].address.place]
    crowded = cores_together(host) < len(host)  # then ranks take turns, and time says little
    if ratio > SLOW_RANK_RED and not crowded:
        return red(found, advice)
    if ratio > SLOW_RANK_YELLOW:
        return yellow(found, advice)
    return green(found)


def links(allocation: Allocation) -> Finding | None:
    """Whether one link between two nodes is slow, by itself or beside the others."""
    if allocation.measured is None or not allocation.measured.links:
        return None
    found = allocation.measured.links
    slowest = min(found, key=lambda link: link.gb_s)
    median = statistics.median(link.gb_s for link in found)
    ends = [allocation.ranks[slowest.first], allocation.ranks[slowest.second]]
    names = " – ".join(f"{r.machine.host} (node {r.launch.node})" for r in ends)
    text = f"{names}: {_speed(slowest.gb_s)}"
    if len(found) > 1:
        text = f"slowest is {text}, median {_speed(median)}"
    apart = ends[0].address.place != ends[1].address.place
    if apart and slowest.gb_s < RED_GB_S:
        return red(f"{text}; less than half of 1 Gbit Ethernet", _CABLE)
    if slowest.gb_s * SLOW_LINK < median:
        return yellow(
            text, f"Every step waits for it. {_CABLE} Or leave one out: #SBATCH --exclude."
        )
    if apart and slowest.gb_s < YELLOW_GB_S:
        return yellow(f"{text}; less than half of 10 Gbit Ethernet", _CABLE)
    return green(text)


def all_reduce(allocation: Allocation) -> Finding | None:
    """How fast gradients are added up; judged between hosts only."""
    measured = allocation.measured
    if measured is None:
        return None
    if not measured.all_reduce:
        return red("not even 32 B in the time given", "Give more: --budget-s 60.")
    first, last = measured.all_reduce[0], measured.all_reduce[-1]
    best = max(measured.all_reduce, key=lambda size: size.bus_gb_s)
    until = f" (up to {size_name(last.bytes)} in the time given)" if measured.skipped_bytes else ""
    found = (
        f"{first.latency_us:,.0f} µs for {size_name(first.bytes)}, bus bandwidth "
        f"{_speed(best.bus_gb_s)} at {size_name(best.bytes)}{until}"
    )
    if not allocation.spans_hosts:
        return green(found)
    if last.bytes < JUDGED_BYTES or best.bus_gb_s < RED_GB_S:
        return red(f"{found}; less than half of 1 Gbit Ethernet", _CABLE)
    if best.bus_gb_s < YELLOW_GB_S or first.latency_us > SLOW_LATENCY_US:
        return yellow(f"{found}; a slow network", _CABLE)
    return green(found)


CHECKS: list[Check[Allocation]] = [
    *(interface, announced_address, clock, shared_folder, compute, links, all_reduce)
]


def _reachable(address: str) -> bool:
    return bool(address) and not is_loopback(address)


def size_name(num_bytes: int) -> str:
    """Return a number of bytes with its unit: 32 B, 1 KiB, 256 MiB."""
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes // size} {unit}"
    return f"{num_bytes} B"


def _speed(gb_s: float) -> str:
    """Return a speed in GB/s, small ones in MB/s."""
    return f"{gb_s:.3g} GB/s" if gb_s >= 0.1 else f"{gb_s * 1e3:.3g} MB/s"
