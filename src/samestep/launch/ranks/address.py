"""Names, addresses and interfaces of this host, and by which of them other hosts are reached."""

import contextlib
import ipaddress
import socket
import time

from samestep.base.errors import UserError

_TRIES = 5
_ELSEWHERE = "192.0.2.1"  # an address that no host has (RFC 5737): its route is the route out


def resolve(name: str) -> str:
    """Return the first address of a host name; empty if it has none."""
    with contextlib.suppress(OSError):
        return _first_address(name)
    return ""


def resolve_master(name: str) -> str:
    """Return the address of the host on which rank 0 listens; retry for some seconds."""
    for left in reversed(range(_TRIES)):
        try:
            return _first_address(name)
        except OSError as error:
            if left == 0 or error.errno != socket.EAI_AGAIN:
                raise UserError(
                    f"The master address {name} does not resolve on {socket.gethostname()} "
                    f"({error.strerror or error}). Set MASTER_ADDR on every rank to an address or "
                    "name of rank 0's host that resolves on all nodes."
                ) from error
        time.sleep(1.0)  # the name server of a node that has just come up may need a moment
    raise AssertionError


def is_loopback(address: str) -> bool:
    """Whether an address never leaves its host."""
    return bool(address) and _without_scope(address).is_loopback


def address_towards(address: str) -> str:
    """Return our address that the kernel would send from; nothing is sent."""
    with udp_socket(address) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """Return the name of the interface with an address; '' if none has it."""
    import psutil  # noqa: PLC0415 - one node needs no interface

    if is_loopback(address):
        return "lo"
    wanted = _without_scope(address)
    for name, owned in psutil.net_if_addrs().items():
        for own in owned:
            is_ip = own.family in (socket.AF_INET, socket.AF_INET6)
            if is_ip and _without_scope(own.address) == wanted:
                return name
    return ""


def interface_towards(master: str, own: str) -> str:
    """Return the interface to name to Gloo; '' where its own choice will do.

    Gloo tells other hosts the address of this host's `own` name, which on Debian is 127.0.1.1. The
    interface that reaches the master, rank 0's host, is one that other hosts can reach.
    """
    if own and not is_loopback(own):
        return ""
    # A master on the loopback: this is rank 0's host, and its own name leads nowhere either.
    towards = address_towards(_ELSEWHERE if is_loopback(master) else master)
    return "" if is_loopback(towards) or not towards else interface_of(towards)


def check_gloo_interfaces(names: str) -> None:
    """Check that each interface in GLOO_SOCKET_IFNAME exists, in the forms that Gloo knows."""
    import psutil  # noqa: PLC0415 - one rank needs no interface

    if names[0] in "^=":
        raise UserError(
            f"GLOO_SOCKET_IFNAME is {names}; Gloo takes only names, such as eth0 or eth0,eth1. "
            "Unset it, or name the interface; ^ and = are for NCCL_SOCKET_IFNAME."
        )
    here = psutil.net_if_addrs()
    if absent := [name for name in names.split(",") if name not in here]:
        raise UserError(
            f"GLOO_SOCKET_IFNAME is {names}, and {socket.gethostname()} has no interface "
            f"{absent[0]}, but {', '.join(sorted(here))}. Name one of these, or unset it."
        )


def udp_socket(address: str) -> socket.socket:
    """Return a socket of an address's family; connecting it sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.socket(family, socket.SOCK_DGRAM)


def _first_address(name: str) -> str:
    return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])


def _without_scope(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(address.partition("%")[0])
