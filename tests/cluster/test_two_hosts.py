"""Training on two hosts, each with a name and an address of its own, joined by a cable.

Where a host's own name leads to 127.0.1.1, as Debian's installer writes it, the ranks do not find
each other until they are told.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import ADDRESSES, Hosts, ip, two_hosts
from tests.command_line import read_json
from tests.examples.programs import TRAIN_DISTRIBUTED, epochs
from tests.idx_files import write_mnist

TRAINING = ("--epochs", "1", "--batch-size", "10", "--data-dir", "data")


@pytest.fixture
def hosts(tmp_path) -> Iterator[Hosts]:
    with two_hosts(tmp_path) as both:
        write_mnist(tmp_path / "data")
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
