"""Two network namespaces joined by a cable: two hosts with names and addresses of their own."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.examples.programs import environment

ADDRESSES = ("10.77.5.1", "10.77.5.2")
PORT = 29501  # nothing else listens in a namespace of our own
NAMES = ("hosta", "hostb")
WITHIN_S = 300


@dataclass
class Hosts:  # two hosts that see each other and nothing else
    folder: Path
    """Where the commands run; both hosts see it."""
    mark: str = field(default_factory=lambda: uuid.uuid4().hex[:6])

    def namespace(self, host: int) -> str:
        return f"samestep-{self.mark}-{host}"

    def interface(self, host: int) -> str:
        return f"ss{self.mark}{host}"

    def enter(self, host: int) -> tuple[str, ...]:
        """Return what to write before a command that is to run on a host, under its name."""
        become = f'hostname {NAMES[host]} && exec "$@"'
        inside = ("ip", "netns", "exec", self.namespace(host))
        return (*inside, "unshare", "--uts", "sh", "-c", become, "sh")

    def connect(self) -> None:
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
        for host in (0, 1):
            for pid in ip("netns", "pids", self.namespace(host)).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    def remove(self) -> None:
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
        command = (
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
            *("--rdzv-backend=c10d", "--rdzv-id=two", f"--rdzv-endpoint={ADDRESSES[0]}:{PORT}"),
        )
        commands = [[*command, *options[host].split(), *program] for host in (0, 1)]
        told = [{"GLOO_SOCKET_IFNAME": self.interface(host)} if more else {} for host in (0, 1)]
        return self.run(commands, [environment(**variables) for variables in told])

    def run(
        self, commands: Sequence[Sequence[str]], environments: Sequence[dict[str, str]]
    ) -> list[subprocess.CompletedProcess[str]]:
        """Run a command on each host at once, with its environment; return how each ended."""
        how = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started = [
            subprocess.Popen([*self.enter(host), *words], cwd=self.folder, env=variables, **how)
            for host, (words, variables) in enumerate(zip(commands, environments, strict=True))
        ]
        try:
            outputs = [process.communicate(timeout=WITHIN_S) for process in started]
        finally:
            self.kill()
        return [
            subprocess.CompletedProcess(process.args, process.returncode, *output)
            for process, output in zip(started, outputs, strict=True)
        ]


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


@contextmanager
def two_hosts(folder: Path, *programs: str) -> Iterator[Hosts]:
    """Give two hosts whose names lead to their addresses; `programs` are needed besides `ip`."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("making network namespaces takes root")
    for program in ("ip", "unshare", *programs):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed: apt install iproute2 util-linux")
    both = Hosts(folder)
    try:
        both.connect()
        both.write_names(own_name_is_loopback=False)
        yield both
    finally:
        both.remove()
