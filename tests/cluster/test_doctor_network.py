"""Doctor between two hosts: network namespaces joined by a cable, which `tc` makes slow."""

import json
import os
import subprocess
import sys

import pytest

from tests.cluster.hosts import ADDRESSES, NAMES, Hosts, ip, two_hosts
from tests.doctor.tables import reds, rows_in

PORT = 29502
WITHIN_S = 300


@pytest.fixture
def hosts(tmp_path):
    """Give two hosts whose names lead to their addresses."""
    with two_hosts(tmp_path, "tc") as both:
        yield both


def start(hosts: Hosts, host: int, *options: str, **more: str) -> subprocess.Popen[str]:
    """Start one rank on one host, as a launcher would."""
    place = {
        "RANK": str(host),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(host),
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": str(PORT),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [*hosts.enter(host), sys.executable, "-m", "samestep", "doctor", "--json", *options],
        cwd=hosts.folder,
        env=os.environ | place | more,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def doctor(hosts: Hosts, *options: str, **more: str):
    """Run doctor on both hosts, with `more` variables.

    Returns:
        Both exit codes, rank 0's rows by name, its whole table, and what both told by stderr.
    """
    started = [start(hosts, host, *options, **more) for host in (0, 1)]
    try:
        ended = [process.communicate(timeout=WITHIN_S) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    table = json.loads(ended[0][0])
    codes = [process.returncode for process in started]
    return codes, rows_in(table), table, [errors for _, errors in ended]


def tc(hosts: Hosts, host: int, *arguments: str) -> None:
    """Change how a host's end of the cable carries what is sent."""
    subprocess.run(["ip", "netns", "exec", hosts.namespace(host), "tc", *arguments], check=True)


def test_two_healthy_hosts_are_green_and_the_cable_is_named(hosts):
    codes, rows, table, errors = doctor(hosts)
    assert reds(rows) == set(), rows
    assert codes == [0, 0], errors
    assert hosts.interface(1) in rows["interface"]["found"]
    assert f"{NAMES[0]} (node 0) – {NAMES[1]} (node 1)" in rows["links"]["found"]
    assert table["all_reduce"][-1]["bytes"] == 256 << 20
    assert [rank["host"] for rank in table["ranks"]] == list(NAMES)
    assert list(hosts.folder.iterdir()) == []


def test_a_slow_cable_is_red_and_names_its_two_hosts(hosts):
    for host in (0, 1):
        tc(
            hosts,
            host,
            "qdisc",
            "add",
            "dev",
            hosts.interface(host),
            "root",
            "tbf",
            "rate",
            "10mbit",
            "burst",
            "32kbit",
            "latency",
            "400ms",
        )
    codes, rows, table, errors = doctor(hosts, "--budget-s", "8")
    assert codes[0] == 1, errors
    assert reds(rows) == {"links", "all reduce"}
    assert f"{NAMES[0]} (node 0) – {NAMES[1]} (node 1)" in rows["links"]["found"]
    assert "1 MiB" in rows["all reduce"]["found"]
    assert 0.2e-3 < table["all_reduce"][-1]["bus_gb_s"] < 10e6 / 8 / 1e9  # of 10 Mbit/s


def test_hosts_whose_own_names_are_loopback_connect_by_the_interface_that_is_named(hosts):
    hosts.write_names(own_name_is_loopback=True)
    codes, rows, _, errors = doctor(hosts, "--timeout-s", "8")
    assert codes == [0, 0], (errors, rows)
    assert rows["announced address"]["status"] == "yellow"
    assert rows["connection"]["status"] == "green"
    assert f"GLOO_SOCKET_IFNAME={hosts.interface(0)}" in rows["announced address"]["advice"]
    assert "127.0.1.1" in rows["announced address"]["found"]
    assert "Traceback" not in errors[0] + errors[1]


def test_a_master_address_that_is_loopback_leaves_the_other_host_without_rank_0(hosts):
    codes, rows, _, errors = doctor(hosts, "--timeout-s", "1", MASTER_ADDR="127.0.0.1")
    assert codes == [1, 1]
    assert reds(rows) == {"roll call"}
    assert "rank 1 of 2" in rows["roll call"]["found"]
    assert errors[1].startswith(f"samestep: [rank 1 on {NAMES[1]}] Rank 0 ")


def test_a_cable_that_is_cut_leaves_nobody_hanging(hosts):
    ip("-n", hosts.namespace(1), "link", "set", hosts.interface(1), "down")
    codes, rows, _, errors = doctor(hosts, "--timeout-s", "1")
    assert codes == [1, 1]
    assert reds(rows) == {"roll call"}
    assert errors[1].count("\n") == 1, errors[1]


def test_an_interface_that_leads_nowhere_is_told_in_bounded_time(hosts):
    for host in (0, 1):
        inside = ("-n", hosts.namespace(host))
        ip(*inside, "link", "add", "spare", "type", "veth", "peer", "name", "loose")
        ip(*inside, "address", "add", f"10.77.6.{host + 1}/24", "dev", "spare")
        for end in ("spare", "loose"):
            ip(*inside, "link", "set", end, "up")
    codes, rows, _, errors = doctor(hosts, "--timeout-s", "3", GLOO_SOCKET_IFNAME="spare")
    assert codes == [1, 1], errors
    assert reds(rows) == {"connection"}
    assert "connecting" in rows["connection"]["found"]
    assert "GLOO_SOCKET_IFNAME=spare" in rows["interface"]["found"]
    assert "Traceback" not in errors[0] + errors[1]
