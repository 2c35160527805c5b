"""Two network namespaces joined by a cable: two hosts with names and addresses of their own.

Each has its own /etc/hosts and looks up names there alone. Where a host's own name leads to
127.0.1.1, as Debian's installer writes it, the ranks do not find each other until they are told.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.command_line import read_json
from tests.examples.programs import TRAIN_DISTRIBUTED, environment, epochs
from tests.idx_files import write_mnist

ADDRESSES = ("10.77.5.1", "10.77.5.2")
PORT = 29501  # nothing else listens in a namespace of our own
NAMES = ("hosta", "hostb")
WITHIN_S = 60
FOLLOWS_WITHIN_S = 3
TRAINING = ("--epochs", "1", "--batch-size", "10", "--data-dir", "data")


@dataclass
class Hosts:
    """Two hosts that see each other and nothing else."""

    folder: Path
    """Where the commands run; both hosts see it."""
    mark: str = field(default_factory=lambda: uuid.uuid4().hex[:6])

    def namespace(self, host: int) -> str:
        """Return the name of a host's network namespace."""
        return f"samestep-{self.mark}-{host}"

    def interface(self, host: int) -> str:
        """Return the name of a host's end of the cable."""
        return f"ss{self.mark}{host}"

    def connect(self) -> None:
        """Make both hosts and the cable between them."""
        for host in (0, 1):
            ip("netns", "add", self.namespace(host))
        ends = [("name", self.interface(h), "netns", self.namespace(h)) for h in (0, 1)]
        ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for host, address in enumerate(ADDRESSES):
            inside = ("-n", self.namespace(host))
            ip(*inside, "address", "add", f"{address}/30", "dev", self.interface(host))
            ip(*inside, "link", "set", "lo", "up")
            ip(*inside, "link", "set", self.interface(host), "up")

    def write_names(self, *, own_name_is_loopback: bool) -> None:
        """Write each host's /etc/hosts; `ip netns exec` puts it in place."""
        for host in (0, 1):
            own = "127.0.1.1" if own_name_is_loopback else ADDRESSES[host]
            folder = Path("/etc/netns") / self.namespace(host)
            folder.mkdir(parents=True, exist_ok=True)
            lines = ["127.0.0.1 localhost", f"{own} {NAMES[host]}"]
            lines.append(f"{ADDRESSES[1 - host]} {NAMES[1 - host]}")
            (folder / "hosts").write_text("\n".join(lines) + "\n")
            (folder / "nsswitch.conf").write_text("hosts: files\n")

    def kill(self) -> None:
        """Kill whatever still runs on the hosts; torchrun's ranks outlive it."""
        for host in (0, 1):
            for pid in ip("netns", "pids", self.namespace(host)).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    def remove(self) -> None:
        """Take down what `connect` made; the cable goes with its ends."""
        with contextlib.suppress(subprocess.CalledProcessError):  # they may be gone already
            self.kill()
        for host in (0, 1):
            shutil.rmtree(Path("/etc/netns") / self.namespace(host), ignore_errors=True)
            subprocess.run(
                ["ip", "netns", "delete", self.namespace(host)], check=False, capture_output=True
            )
        with contextlib.suppress(OSError):
            Path("/etc/netns").rmdir()  # ours only if it is empty

    def bytes_sent(self, host: int) -> int:
        """Return how many bytes a host has sent over the cable."""
        told = ip("-n", self.namespace(host), "-s", "link", "show", self.interface(host))
        return int(re.search(r"TX:.*\n\s*(\d+)", told)[1])

    def torchrun(
        self, *program: str, options: tuple[str, str] = ("", ""), more: bool = False
    ) -> list[subprocess.CompletedProcess[str]]:
        """Start torchrun with one rank on each host; return how each ended.

        Args:
            program: what the ranks run.
            options: of torchrun, on the first and on the second host.
            more: whether to tell Gloo its interface.
        """
        started = [self._start(host, program, options[host].split(), more=more) for host in (0, 1)]
        with ThreadPoolExecutor() as pool:
            reading = [pool.submit(process.communicate) for process in started]
            first, _ = wait(reading, timeout=WITHIN_S, return_when=FIRST_COMPLETED)
            # Where one host fails, the other may wait for it as long as Gloo does: half an hour.
            failed = any(process.returncode for process in started)
            wait(reading, timeout=FOLLOWS_WITHIN_S if failed or not first else WITHIN_S)
            self.kill()
            outputs = [future.result() for future in reading]
        return [
            subprocess.CompletedProcess(process.args, process.returncode, *output)
            for process, output in zip(started, outputs, strict=True)
        ]

    def _start(
        self, host: int, program: tuple[str, ...], options: list[str], *, more: bool
    ) -> subprocess.Popen[str]:
        told = {"GLOO_SOCKET_IFNAME": self.interface(host)} if more else {}
        become = f'hostname {NAMES[host]} && exec "$@"'
        return subprocess.Popen(
            [
                *("ip", "netns", "exec", self.namespace(host)),
                *("unshare", "--uts", "sh", "-c", become, "sh"),
                *(sys.executable, "-m", "torch.distributed.run"),
                *("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=two"),
                *(f"--rdzv-endpoint={ADDRESSES[0]}:{PORT}", *options, *program),
            ],
            cwd=self.folder, env=environment(**told), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip


def ip(*arguments: str) -> str:
    """Run Linux's `ip`; return what it printed."""
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def hosts(tmp_path) -> Iterator[Hosts]:
    """Give two hosts whose names lead to their addresses, and a data set."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("making network namespaces takes root")
    for program in ("ip", "unshare"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed: apt install iproute2 util-linux")
    write_mnist(tmp_path / "data")
    both = Hosts(tmp_path)
    try:
        both.connect()
        both.write_names(own_name_is_loopback=False)
        yield both
    finally:
        both.remove()


def test_the_plain_script_trains_on_two_hosts_over_the_cable(hosts):
    before = [hosts.bytes_sent(host) for host in (0, 1)]
    ended = hosts.torchrun(TRAIN_DISTRIBUTED, *TRAINING)
    assert [done.returncode for done in ended] == [0, 0], ended
    printed = [done.stdout for done in ended]
    assert "" in printed  # whichever host torchrun gave rank 0 prints, the other not
    lines = max(printed).splitlines()
    assert lines[0] == "Starting distributed training on 2 GPUs"
    assert {f"Master node: {name}" for name in NAMES} & {*lines}
    assert len(epochs("\n".join(lines))) == 1
    # Six steps' gradients of 1.2 million numbers of 4 bytes, from each host to the other.
    sent = [hosts.bytes_sent(host) - start for host, start in zip((0, 1), before, strict=True)]
    assert min(sent) > 6 * 1.2e6 * 4 / 2


def test_samestep_trains_on_two_hosts_and_says_so(hosts):
    train = ("-m", "samestep", "train", "spiral", "--epochs", "1", "--num-samples", "500")
    ended = hosts.torchrun(*train, "--run-dir", "run")
    assert [done.returncode for done in ended] == [0, 0], ended
    assert sum("epoch 1 " in done.stdout for done in ended) == 1
    assert "".join(done.stdout for done in ended).count("2 ranks on 2 nodes, cpu, gloo") == 1
    result = read_json(hosts.folder / "run" / "result.json")
    assert (result["status"], result["world_size"]) == ("completed", 2)
    assert read_json(hosts.folder / "run" / "environment.json")["num_nodes"] == 2
    assert min(hosts.bytes_sent(host) for host in (0, 1)) > 10_000


# What run_distributed.slurm tells torchrun: who hosts the rendezvous, and each one's address.
TOLD = (
    f"--rdzv-conf=is_host=1 --local-addr={ADDRESSES[0]}",
    f"--rdzv-conf=is_host=0 --local-addr={ADDRESSES[1]}",
)


def test_where_own_names_are_loopback_ranks_meet_by_address_and_interface(hosts):
    hosts.write_names(own_name_is_loopback=True)
    ended = hosts.torchrun(TRAIN_DISTRIBUTED, *TRAINING, options=TOLD, more=True)
    assert [done.returncode for done in ended] == [0, 0], ended
    printed = "".join(done.stdout for done in ended)
    assert any(f"Master node: {address}\n" in printed for address in ADDRESSES)
    assert len(epochs(printed)) == 1


def test_where_own_names_are_loopback_the_address_without_the_interface_does_not_do(hosts):
    hosts.write_names(own_name_is_loopback=True)
    ended = hosts.torchrun(TRAIN_DISTRIBUTED, *TRAINING, options=TOLD)
    assert all(done.returncode for done in ended)
    # Gloo tells the others the address that it found by the host's own name.
    errors = "".join(done.stderr for done in ended)
    print(errors)
    assert re.search(r"Gloo connectFullMesh failed.*127\.0\.1\.1", errors)


def test_where_own_names_are_loopback_no_host_takes_the_meeting_point_for_its_own(hosts):
    hosts.write_names(own_name_is_loopback=True)
    ask = "from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname as ours"
    for host, own in ((0, ADDRESSES[0]), (1, ADDRESSES[1])):
        become = f'hostname {NAMES[host]} && exec "$@"'
        said = ip(
            *("netns", "exec", hosts.namespace(host), "unshare", "--uts", "sh", "-c", become, "sh"),
            *(sys.executable, "-c", f"{ask}; print(ours('{own}'))"),
        )
        assert said == "False\n"  # hence is_host: else both wait for a listener until they give up


def test_nothing_is_left_of_the_hosts(hosts):
    names = [hosts.namespace(host) for host in (0, 1)]
    assert all(name in ip("netns", "list") for name in names)
    hosts.remove()
    left = ip("netns", "list") + " ".join(path.name for path in Path("/etc").glob("netns/*"))
    assert not any(name in left for name in names)
    assert hosts.interface(0) not in ip("link", "show")
