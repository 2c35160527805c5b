"""Names, addresses and interfaces: how this host is reached, and how it reaches rank 0's."""

import os
import socket
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from samestep.doctor.facts import Address, Allocation
from samestep.doctor.findings import Check, Finding, green, red, yellow
from samestep.doctor.timeouts import value_within
from samestep.ranks import address as addresses

RESOLVE_S = 5.0


def read_address(master: str, environment: Mapping[str, str] = os.environ) -> Address:
    """Read the facts; names are given a few seconds to resolve."""
    resolved = _resolve(master)
    local = addresses.address_towards(resolved) if resolved else ""
    own = _resolve(socket.gethostname())
    return Address(
        place=_place(),
        master=resolved,
        local=local,
        interface=addresses.interface_of(local) if local else "",
        own=own,
        chosen=addresses.interface_towards(resolved, own) if resolved else "",
        gloo_interface=environment.get("GLOO_SOCKET_IFNAME", ""),
        nccl_interface=environment.get("NCCL_SOCKET_IFNAME", ""),
    )


def _resolve(name: str) -> str:
    return value_within(RESOLVE_S, lambda: addresses.resolve(name), "")


def _place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = Path("/proc/self/ns/net").readlink()
    except OSError:
        return socket.gethostname()  # not Linux
    return f"{socket.gethostname()}/{boot}/{network}"


def interface(allocation: Allocation) -> Finding | None:
    """Which interface carries the traffic to rank 0."""
    ranks = allocation.ranks
    if len(ranks) == 1:
        return None
    home = ranks[0].address
    away = [rank for rank in ranks if rank.address.place != home.place]
    if inside := [rank for rank in away if addresses.is_loopback(rank.address.local)]:
        return red(
            f"{inside[0].label} reaches rank 0 by its own loopback interface",
            "MASTER_ADDR must be a name or address of rank 0's host that means the same on all "
            "nodes, not localhost.",
        )
    # Rank 0's own host reaches itself by loopback, whatever the others take.
    names = Counter(rank.address.interface or rank.address.local for rank in away or ranks)
    chosen = {("GLOO", r.address.gloo_interface) for r in ranks}
    chosen |= {("NCCL", r.address.nccl_interface) for r in ranks}
    forced = [f"{library}_SOCKET_IFNAME={name}" for library, name in sorted(chosen) if name]
    found = ", ".join([*names, *forced])
    if not away:
        return green(f"{found}: all ranks are on one host")
    if len(names) > 1:
        advice = "Take one network for all, by NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME."
        return yellow(f"{found}: not the same on all nodes", advice)
    return green(found)


def announced_address(allocation: Allocation) -> Finding | None:
    """Gloo tells the others the address that a host's own name resolves to there."""
    if not allocation.spans_hosts:
        return None
    wrong = []
    for rank in allocation.ranks:
        chosen, own = rank.address.gloo_interface, rank.address.own
        if chosen == "lo" or (not chosen and (not own or addresses.is_loopback(own))):
            wrong.append(rank)
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


CHECKS: list[Check[Allocation]] = [interface, announced_address]
