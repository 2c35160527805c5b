"""How this rank's host is reached, and by which interface it reaches rank 0's."""

import array
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from samestep.doctor.bounded import within

RESOLVE_S = 5.0
_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface


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
    gloo_interface: str = ""
    """GLOO_SOCKET_IFNAME."""
    nccl_interface: str = ""
    """NCCL_SOCKET_IFNAME."""


def read_address(master: str, environment: Mapping[str, str] = os.environ) -> Address:
    """Read the facts; names are given a few seconds to resolve."""
    resolved = resolve(master)
    local = _address_towards(resolved) if resolved else ""
    return Address(
        place=_place(),
        master=resolved,
        local=local,
        interface=interface_of(local) if local else "",
        own=resolve(socket.gethostname()),
        gloo_interface=environment.get("GLOO_SOCKET_IFNAME", ""),
        nccl_interface=environment.get("NCCL_SOCKET_IFNAME", ""),
    )


def resolve(name: str) -> str:
    """Return the first address of a host name; empty if there is none in time."""

    def ask() -> str:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])

    return within(RESOLVE_S, ask, "")


def is_loopback(address: str) -> bool:
    """Whether an address never leaves its host."""
    return bool(address) and ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_own(address: str) -> bool:
    """Whether an address is one of this host's: only its own can be bound."""
    with _udp(address) as probe:
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


def interface_of(address: str) -> str:
    """Return the name of the interface with an address (Linux; elsewhere nothing)."""
    if is_loopback(address):
        return "lo"
    if ":" in address:
        return _interface_of_ipv6(address)
    try:
        import fcntl  # noqa: PLC0415 - absent on Windows

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                request = array.array("b", struct.pack("256s", name.encode()[:15]))
                try:
                    fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                except OSError:
                    continue  # it has no IPv4 address
                if socket.inet_ntoa(request.tobytes()[20:24]) == address:
                    return name
    except (ImportError, OSError):
        pass
    return ""


def _interface_of_ipv6(address: str) -> str:
    wanted = ipaddress.IPv6Address(address.partition("%")[0]).packed.hex()
    try:
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    except OSError:
        return ""
    return next((row[5] for row in rows if row[0] == wanted), "")


def _udp(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.socket(family, socket.SOCK_DGRAM)


def _address_towards(address: str) -> str:
    """Ask the kernel which of our addresses it would send from; nothing is sent."""
    with _udp(address) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def _place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = Path("/proc/self/ns/net").readlink()
    except OSError:
        return socket.gethostname()  # not Linux
    return f"{socket.gethostname()}/{boot}/{network}"
