"""Doctor between two hosts: network namespaces joined by a cable, which `tc` makes slow."""

import json
import os
import subprocess
import sys

import pytest

from tests.cluster.hosts import ADDRESSES, NAMES, Hosts, ip, two_hosts
from tests.doctor.situations import reds, rows_in
from tests.processes import launch_environment

PORT = 29502
WITHIN_S = 300


@pytest.fixture
def hosts(tmp_path):
    with two_hosts(tmp_path, "tc") as both:
        yield both


def doctor(hosts: Hosts, *options: str, **more: str):
    """Run doctor on both hosts, one rank on each as a launcher starts it, with `more` variables.

    Returns:
        Both exit codes, rank 0's rows by name, its whole table, and what both told by stderr.
    """
    command = (sys.executable, "-m", "samestep", "doctor", "--json", *options)
    one_each = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "2"}
    one_each |= {"MASTER_ADDR": ADDRESSES[0], "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [*hosts.enter(host), *command],
            cwd=hosts.folder,
            env=os.environ
            | launch_environment(host, 2, PORT)
            | one_each
            | {"GROUP_RANK": str(host)}
            | more,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for host in (0, 1)
    ]
    try:
        ended = [process.communicate(timeout=WITHIN_S) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    table = json.loads(ended[0][0])
    codes = [process.returncode for process in started]
    return codes, rows_in(table), table, [errors for _, errors in ended]


def test_a_slow_cable_is_red_and_names_its_two_hosts(hosts):
    for host in (0, 1):
        # Ten million bits a second.
        where = ("qdisc", "add", "dev", hosts.interface(host), "root", "tbf")
        slow = ("rate", "10mbit", "burst", "32kbit", "latency", "400ms")
        enter = ("ip", "netns", "exec", hosts.namespace(host))
        subprocess.run([*enter, "tc", *where, *slow], check=True)
    codes, rows, table, errors = doctor(hosts, "--budget-s", "8")
    assert codes[0] == 1, errors
    assert reds(rows) == {"links", "all reduce"}
    assert f"{NAMES[0]} (node 0) – {NAMES[1]} (node 1)" in rows["links"]["found"]
    assert "1 MiB" in rows["all reduce"]["found"]
    assert 0.2e-3 < table["all_reduce"][-1]["bus_gb_s"] < 10e6 / 8 / 1e9  # of 10 Mbit/s


def test_hosts_whose_own_names_are_loopback_connect_by_the_interface_that_is_named(hosts):
    hosts.write_names(own_name_is_loopback=True)
    codes, rows, table, errors = doctor(hosts, "--timeout-s", "8", "--budget-s", "2")
    assert (codes, reds(rows)) == ([0, 0], set()), (errors, rows)
    assert [rank["host"] for rank in table["ranks"]] == list(NAMES)
    assert f"{NAMES[0]} (node 0) – {NAMES[1]} (node 1)" in rows["links"]["found"]
    assert rows["announced address"]["status"] == "yellow"
    assert rows["connection"]["status"] == "green"
    assert f"GLOO_SOCKET_IFNAME={hosts.interface(0)}" in rows["announced address"]["advice"]
    assert "127.0.1.1" in rows["announced address"]["found"]
    assert "Traceback" not in errors[0] + errors[1]
    assert list(hosts.folder.iterdir()) == []


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
