"""How this rank's host is reached, and by which interface it reaches rank 0's."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from samestep.doctor.bounded import within
from samestep.ranks.address import (
    address_towards,
    interface_of,
    interface_towards,
    resolve,
    udp_socket,
)

RESOLVE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Address:
    """A rank's place in the network."""

    place: str
    """Differs between any two hosts, also between containers with networks of their own."""
    master: str = ""
    """The address that the master's name resolves to here; empty if it does not."""
    local: str = ""
    """This host's own address on the way there."""
    interface: str = ""
    """The interface that has that address; empty if not found."""
    own: str = ""
    """What this host's own name resolves to here; Gloo announces it to the others."""
    chosen: str = ""
    """The interface that samestep names to Gloo by itself; empty where it leaves that to Gloo."""
    gloo_interface: str = ""
    """GLOO_SOCKET_IFNAME."""
    nccl_interface: str = ""
    """NCCL_SOCKET_IFNAME."""


def read_address(master: str, environment: Mapping[str, str] = os.environ) -> Address:
    """Read the facts; names are given a few seconds to resolve."""
    resolved = _resolve(master)
    local = address_towards(resolved) if resolved else ""
    own = _resolve(socket.gethostname())
    return Address(
        place=_place(),
        master=resolved,
        local=local,
        interface=interface_of(local) if local else "",
        own=own,
        chosen=interface_towards(resolved, own) if resolved else "",
        gloo_interface=environment.get("GLOO_SOCKET_IFNAME", ""),
        nccl_interface=environment.get("NCCL_SOCKET_IFNAME", ""),
    )


def _resolve(name: str) -> str:
    return within(RESOLVE_S, lambda: resolve(name), "")


def is_own(address: str) -> bool:
    """Whether an address is one of this host's: only its own can be bound."""
    with udp_socket(address) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def port_is_free(port: int) -> bool:
    """Whether this process could listen on a port."""
    with socket.socket() as probe:
        # As PyTorch's own store does: what closed a minute ago is no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = Path("/proc/self/ns/net").readlink()
    except OSError:
        return socket.gethostname()  # not Linux
    return f"{socket.gethostname()}/{boot}/{network}"
