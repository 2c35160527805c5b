"""The master address and port, examined before any rank waits for another."""

import socket

from samestep.doctor.facts import RankFacts
from samestep.doctor.findings import Check, Finding, green, red
from samestep.ranks.address import udp_socket
from samestep.ranks.world import agent_serves


def master_address(rank: RankFacts) -> Finding:
    """Whether the master's name resolves, on rank 0 to its own host."""
    name, address = rank.launch.master_addr, rank.address.master
    if not address:
        return red(
            f"{name} does not resolve",
            "Set MASTER_ADDR to a name or address of rank 0's host that every node knows: try "
            f"getent hosts {name} on each.",
        )
    shown = name if name == address else f"{name} is {address}"
    listens = rank.launch.rank == 0 and not agent_serves()
    # Only an address of this host's own can be bound.
    if listens and not _can_bind(udp_socket(address), address, 0):
        return red(
            f"{shown}, which is not an address of rank 0's host",
            "Set MASTER_ADDR to rank 0's host, or unset it: under srun it follows from the job.",
        )
    return green(shown)


def master_port(rank: RankFacts) -> Finding | None:
    """Whether rank 0 can listen; torchrun's agent may do so in its place."""
    port = rank.launch.master_port
    if agent_serves():
        return green(f"{port}, held by torchrun's agent")
    if rank.launch.rank != 0:
        return None
    probe = socket.socket()
    # As PyTorch's own store does: what closed a minute ago is no obstacle.
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if not _can_bind(probe, "", port):
        return red(
            f"port {port} on {rank.launch.master_addr} is taken",
            "Set MASTER_PORT to a free port on every rank; `ss -ltnp` shows who has this one.",
        )
    return green(f"{port} was free")


CHECKS: list[Check[RankFacts]] = [master_address, master_port]


def _can_bind(probe: socket.socket, address: str, port: int) -> bool:
    with probe:
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True
