"""How ranks find each other: the master address and port, host names, interfaces."""

import os
import socket
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from samestep.cluster.doctor.findings import Check, Finding, green, red, yellow
from samestep.cluster.doctor.rank_facts import Address, Allocation, RankFacts, value_within
from samestep.launch.ranks.address import (
    address_towards,
    interface_of,
    interface_towards,
    is_loopback,
    resolve,
    udp_socket,
)
from samestep.launch.ranks.world import agent_serves

RESOLVE_S = 5.0


def read_address(master: str, environment: Mapping[str, str] = os.environ) -> Address:
    """Read the facts; names get a few seconds to resolve."""
    resolved, own = (
        value_within(RESOLVE_S, partial(resolve, name), "")
        for name in (master, socket.gethostname())
    )
    local = address_towards(resolved) if resolved else ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        place = f"{socket.gethostname()}/{boot}/{Path('/proc/self/ns/net').readlink()}"
    except OSError:
        place = socket.gethostname()  # not Linux
    return Address(
        place=place,
        master=resolved,
        local=local,
        interface=interface_of(local) if local else "",
        own=own,
        chosen=interface_towards(resolved, own) if resolved else "",
        gloo_interface=environment.get("GLOO_SOCKET_IFNAME", ""),
        nccl_interface=environment.get("NCCL_SOCKET_IFNAME", ""),
    )


def master_address(rank: RankFacts) -> Finding:
    """Check that the master's name resolves, on rank 0 to an address of its own host."""
    name, address = rank.launch.master_addr, rank.address.master
    if not address:
        return red(
            f"{name} does not resolve",
            "Set MASTER_ADDR to a name or address of rank 0's host that every node knows: try "
            f"getent hosts {name} on each.",
        )
    shown = name if name == address else f"{name} is {address}"
    listens = rank.launch.rank == 0 and not agent_serves()
    # Only an address of this host can be bound.
    if listens and not _can_bind(udp_socket(address), address, 0):
        return red(
            f"{shown}, which is not an address of rank 0's host",
            "Set MASTER_ADDR to rank 0's host, or unset it: under srun it follows from the job.",
        )
    return green(shown)


def master_port(rank: RankFacts) -> Finding | None:
    """Check that rank 0 can listen; torchrun's agent may do so in its place."""
    port = rank.launch.master_port
    if agent_serves():
        return green(f"{port}, held by torchrun's agent")
    if rank.launch.rank != 0:
        return None
    probe = socket.socket()
    # As PyTorch's store does: a port that was closed a minute ago can be used.
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if not _can_bind(probe, "", port):
        return red(
            f"port {port} on {rank.launch.master_addr} is taken",
            "Set MASTER_PORT to a free port on every rank; `ss -ltnp` shows what holds it.",
        )
    return green(f"{port} was free")


MEETING_CHECKS: list[Check[RankFacts]] = [master_address, master_port]
"""What a rank checks before it waits for others."""


def _can_bind(probe: socket.socket, address: str, port: int) -> bool:
    with probe:
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def interface(allocation: Allocation) -> Finding | None:
    """Check which interfaces carry the traffic to rank 0."""
    ranks = allocation.ranks
    if len(ranks) == 1:
        return None
    away = [rank for rank in ranks if rank.address.place != ranks[0].address.place]
    if inside := [rank for rank in away if is_loopback(rank.address.local)]:
        return red(
            f"{inside[0].label} reaches rank 0 by its own loopback interface",
            "MASTER_ADDR must be a name or address of rank 0's host that means the same on all "
            "nodes, not localhost.",
        )
    # Rank 0's own host reaches itself by loopback, whatever the others use.
    names = Counter(rank.address.interface or rank.address.local for rank in away or ranks)
    chosen = {("GLOO", r.address.gloo_interface) for r in ranks}
    chosen |= {("NCCL", r.address.nccl_interface) for r in ranks}
    forced = [f"{library}_SOCKET_IFNAME={name}" for library, name in sorted(chosen) if name]
    found = ", ".join([*names, *forced])
    if not away:
        return green(f"{found}: all ranks are on one host")
    if len(names) > 1:
        advice = "Choose one network for all with NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME."
        return yellow(f"{found}: nodes use different interfaces", advice)
    return green(found)


def announced_address(allocation: Allocation) -> Finding | None:
    """Check the address that Gloo announces: what a host's own name resolves to there."""
    if not allocation.spans_hosts:
        return None
    wrong = [
        rank
        for rank in allocation.ranks
        if (chosen := rank.address.gloo_interface) == "lo"
        or (not chosen and (not rank.address.own or is_loopback(rank.address.own)))
    ]
    if not wrong:
        return green("every host's own name resolves to an address that others can reach")
    rank = next((r for r in wrong if not r.address.chosen or r.address.gloo_interface), wrong[0])
    address, host = rank.address, rank.machine.host
    name = address.interface if address.interface not in ("", "lo") else "eth0"
    why = f"resolves to {address.own} on that host" if address.own else "does not resolve"
    if address.gloo_interface:
        why = "has GLOO_SOCKET_IFNAME=lo"
    elif address.chosen:
        return yellow(
            f"{host} {why}; samestep makes Gloo use {address.chosen}",
            f"For other programs set GLOO_SOCKET_IFNAME={address.chosen}, or correct /etc/hosts.",
        )
    return red(
        f"{host} {why}: other nodes cannot reach Gloo there",
        f"Set GLOO_SOCKET_IFNAME={name} (the interface between the nodes) for every rank, or "
        "correct /etc/hosts.",
    )


CHECKS: list[Check[Allocation]] = [interface, announced_address]
