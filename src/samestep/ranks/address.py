"""Names, addresses and interfaces of this host, and by which of them other hosts are reached."""

import array
import ipaddress
import socket
import struct
import time
from pathlib import Path

from samestep.errors import UserError

_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface
_TRIES = 5


def resolve(name: str) -> str:
    """Return the first address of a host name; empty if it has none."""
    try:
        return _first_address(name)
    except OSError:
        return ""


def resolve_master(name: str) -> str:
    """Return the address of the host on which rank 0 listens.

    Raises:
        UserError: it has none; the name server was asked for some seconds.
    """
    for left in reversed(range(_TRIES)):
        try:
            return _first_address(name)
        except OSError as error:
            if left == 0 or getattr(error, "errno", None) != socket.EAI_AGAIN:
                raise UserError(
                    f"The master address {name} does not resolve on {socket.gethostname()} "
                    f"({error.strerror or error}). Set MASTER_ADDR on every rank to an address or "
                    "a name of rank 0's host that means the same on all nodes."
                ) from error
        time.sleep(1.0)  # the name server of a node that has just come up may need a moment
    raise AssertionError


def is_loopback(address: str) -> bool:
    """Whether an address never leaves its host."""
    return bool(address) and ipaddress.ip_address(address.partition("%")[0]).is_loopback


def address_towards(address: str) -> str:
    """Return which of our addresses the kernel would send from; nothing is sent."""
    with udp_socket(address) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


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


def interface_towards(master: str, own: str) -> str:
    """Return the interface to name to Gloo; empty where its own choice will do.

    Gloo tells the other hosts the address that this host's own name leads to, and on Debian that is
    127.0.1.1. The interface on the way to rank 0's host is one that they can reach.

    Args:
        master: the address on which rank 0 listens.
        own: the address that this host's own name leads to; empty if it leads nowhere.
    """
    if own and not is_loopback(own):
        return ""
    if is_loopback(master):  # this is rank 0's host, and its own name leads nowhere either
        master = _ELSEWHERE
    towards = address_towards(master)
    return "" if is_loopback(towards) or not towards else interface_of(towards)


_ELSEWHERE = "192.0.2.1"
"""An address that no host has (RFC 5737): the way there is the way out."""


def udp_socket(address: str) -> socket.socket:
    """Return a socket of an address's family, which sends nothing by being connected."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.socket(family, socket.SOCK_DGRAM)


def _first_address(name: str) -> str:
    return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])


def _interface_of_ipv6(address: str) -> str:
    wanted = ipaddress.IPv6Address(address.partition("%")[0]).packed.hex()
    try:
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    except OSError:
        return ""
    return next((row[5] for row in rows if row[0] == wanted), "")
