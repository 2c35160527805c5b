"""Checks of the master address, made before any rank waits for another."""

from samestep.doctor.check import Check, Finding, green, red
from samestep.doctor.facts.rendezvous import Rendezvous


def master_address(meeting: Rendezvous) -> Finding:
    """Whether the master's name resolves, on rank 0 to its own host."""
    if not meeting.address:
        return red(
            f"{meeting.name} does not resolve",
            "Set MASTER_ADDR to a name or address of rank 0's host that every node knows: try "
            f"getent hosts {meeting.name} on each.",
        )
    shown = meeting.name + (f" is {meeting.address}" if meeting.address != meeting.name else "")
    if not meeting.is_own:
        return red(
            f"{shown}, which is not an address of rank 0's host",
            "Set MASTER_ADDR to rank 0's host, or unset it: under srun it follows from the job.",
        )
    return green(shown)


def master_port(meeting: Rendezvous) -> Finding | None:
    """Whether rank 0 can listen."""
    if not meeting.is_free:
        return red(
            f"port {meeting.port} on {meeting.name} is taken",
            "Set MASTER_PORT to a free port on every rank; `ss -ltnp` shows who has this one.",
        )
    if meeting.served_by_agent:
        return green(f"{meeting.port}, held by torchrun's agent")
    return green(f"{meeting.port} was free") if meeting.listens else None


CHECKS: list[Check[Rendezvous]] = [master_address, master_port]
