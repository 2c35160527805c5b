"""Which interface carries the traffic, and what a name that leads nowhere comes to."""

import socket
from types import SimpleNamespace

import pytest

from samestep.errors import UserError
from samestep.ranks import address as addresses
from samestep.ranks.address import check_gloo_interfaces, interface_of, interface_towards, resolve


def test_a_master_without_an_address_is_refused_at_once_with_its_name_and_this_host():
    with pytest.raises(UserError, match=r"no-such-host\.invalid") as error:
        addresses.resolve_master("no-such-host.invalid")
    assert socket.gethostname() in str(error.value)
    assert "MASTER_ADDR" in str(error.value)


def test_a_name_server_that_needs_a_moment_is_asked_again(monkeypatch):
    answers = iter([socket.gaierror(socket.EAI_AGAIN, "later"), [(0, 0, 0, "", ("10.1.2.3", 0))]])

    def ask(*_, **__):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(addresses.socket, "getaddrinfo", ask)
    monkeypatch.setattr(addresses, "time", SimpleNamespace(sleep=lambda _: None))
    assert addresses.resolve_master("node1") == "10.1.2.3"


@pytest.mark.parametrize(
    ("address", "inside"),
    [("127.0.1.1", True), ("::1", True), ("10.0.0.1", False), ("fe80::1%eth0", False), ("", False)],
)
def test_a_loopback_address_is_told_from_others(address, inside):
    assert addresses.is_loopback(address) == inside


def test_loopback_has_its_interface():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.77") == ""  # of a net for documentation
    assert resolve("localhost") in ("127.0.0.1", "::1")


@pytest.mark.parametrize("own", ["127.0.1.1", ""])
def test_where_it_has_none_the_interface_on_the_way_to_rank_0_is_named(monkeypatch, own):
    ways = {"10.9.9.9": "10.1.2.3", "192.0.2.1": "10.4.5.6"}
    monkeypatch.setattr(addresses, "address_towards", lambda to: ways.get(to, "127.0.0.1"))
    names = {"10.1.2.3": "ib0", "10.4.5.6": "eth0"}
    monkeypatch.setattr(addresses, "interface_of", lambda address: names[address])
    assert interface_towards("10.9.9.9", own) == "ib0"
    assert interface_towards("127.0.1.1", own) == "eth0"  # on rank 0's own host: the way out
    assert interface_towards("10.9.9.9", own="10.1.2.3") == "", "Gloo chooses by itself"
    monkeypatch.setattr(addresses, "address_towards", lambda _: "")  # without a network
    assert interface_towards("127.0.1.1", own) == ""


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ("^docker,lo", "NCCL_SOCKET_IFNAME"),
        ("=lo", "NCCL_SOCKET_IFNAME"),
        ("no-such-0", "no interface no-such-0, but .*lo"),
        ("lo,no-such-0", "no interface no-such-0"),
    ],
)
def test_an_interface_with_which_gloo_cannot_start_is_refused_with_those_that_are_here(names, says):
    with pytest.raises(UserError, match=f"GLOO_SOCKET_IFNAME is .*{says}"):
        check_gloo_interfaces(names)
    check_gloo_interfaces("lo")
