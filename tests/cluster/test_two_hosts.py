"""Two hosts joined by a cable, each with a name and an address of its own: doctor and training."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import ADDRESSES, NAMES, Hosts, ip, two_hosts
from tests.command_line import read_json
from tests.doctor.situations import reds, rows_in
from tests.examples.programs import TRAIN_DISTRIBUTED, epochs
from tests.idx_files import write_mnist
from tests.processes import launch_environment

TRAINING = ("--epochs", "1", "--batch-size", "10", "--data-dir", "data")


@pytest.fixture
def hosts(tmp_path) -> Iterator[Hosts]:
    with two_hosts(tmp_path, "tc") as both:
        yield both


# What run_distributed.slurm tells torchrun: who hosts the rendezvous, and each one's address.
TOLD = (
    f"--rdzv-conf=is_host=1 --local-addr={ADDRESSES[0]}",
    f"--rdzv-conf=is_host=0 --local-addr={ADDRESSES[1]}",
)


def test_where_own_names_are_loopback_ranks_meet_by_address_and_interface(hosts):
    hosts.write_names(own_name_is_loopback=True)
    # Without is_host both would wait for a listener until they give up.
    ask = "from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname as ours"
    program = (sys.executable, "-c", f"{ask}; print(ours('{ADDRESSES[0]}'))")
    said = subprocess.run([*hosts.enter(0), *program], check=True, capture_output=True, text=True)
    assert said.stdout == "False\n"
    write_mnist(hosts.folder / "data")
    before = [hosts.bytes_sent(host) for host in (0, 1)]
    ended = hosts.torchrun(TRAIN_DISTRIBUTED, *TRAINING, options=TOLD, more=True)
    assert [done.returncode for done in ended] == [0, 0], ended
    printed = [done.stdout for done in ended]
    assert "" in printed  # whichever host torchrun gave rank 0 prints, the other not
    lines = max(printed).splitlines()
    assert lines[0] == "Starting distributed training on 2 CPU ranks"
    assert {f"Master node: {address}" for address in ADDRESSES} & {*lines}
    assert len(epochs(max(printed))) == 1
    # Six steps' gradients of 1.2 million numbers of 4 bytes, from each host to the other.
    sent = [hosts.bytes_sent(host) - start for host, start in zip((0, 1), before, strict=True)]
    assert min(sent) > 6 * 1.2e6 * 4 / 2


def test_where_own_names_are_loopback_samestep_finds_the_interface_itself(hosts):
    hosts.write_names(own_name_is_loopback=True)
    train = ("-m", "samestep", "train", "spiral", "--epochs", "1", "--num-samples", "500")
    ended = hosts.torchrun(*train, "--run-dir", "run", options=TOLD)
    assert [done.returncode for done in ended] == [0, 0], ended
    assert sum("epoch 1 " in done.stdout for done in ended) == 1
    assert "".join(done.stdout for done in ended).count("2 ranks on 2 nodes, cpu, gloo") == 1
    result = read_json(hosts.folder / "run" / "result.json")
    assert (result["status"], result["world_size"]) == ("completed", 2)
    assert read_json(hosts.folder / "run" / "environment.json")["num_nodes"] == 2
    assert min(hosts.bytes_sent(host) for host in (0, 1)) > 10_000

    names = [hosts.namespace(host) for host in (0, 1)]
    assert all(name in ip("netns", "list") for name in names)
    hosts.remove()
    left = ip("netns", "list") + " ".join(path.name for path in Path("/etc").glob("netns/*"))
    assert not any(name in left for name in names)
    assert hosts.interface(0) not in ip("link", "show")


PORT = 29502


def doctor(hosts: Hosts, *options: str, **more: str):
    """Run doctor on both hosts, one rank on each as a launcher starts it, with `more` variables.

    Returns:
        Both exit codes, rank 0's rows by name, its whole table, and what both told by stderr.
    """
    command = (sys.executable, "-m", "samestep", "doctor", "--json", *options)
    one_each = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "2"}
    one_each |= {"MASTER_ADDR": ADDRESSES[0], "OMP_NUM_THREADS": "1"}
    ranks = [launch_environment(host, 2, PORT) | {"GROUP_RANK": str(host)} for host in (0, 1)]
    ended = hosts.run([command] * 2, [os.environ | rank | one_each | more for rank in ranks])
    table = json.loads(ended[0].stdout)
    codes, errors = zip(*((done.returncode, done.stderr) for done in ended), strict=True)
    return list(codes), rows_in(table), table, errors


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
    codes, rows, table, errors = doctor(hosts, "--timeout-s", "20", "--budget-s", "2")
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
