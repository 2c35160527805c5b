"""Where a keeper starts its ranks: on this machine, or by srun on the nodes of its job."""

import contextlib
import os
import shlex
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from samestep.base.startup import HOSTS, JOB_RUN, PARENT
from samestep.launch.ranks.launch import LOOPBACK
from samestep.launch.ranks.process import MEMBER
from samestep.launch.ranks.watched import FOLDER

PER_NODE = "SAMESTEP_RANKS_PER_NODE"
"""Set by the script that sets `HOSTS`: how many ranks each node has."""
ELASTIC = "SAMESTEP_ELASTIC"
"""Set by the same script: how few and how many ranks may train, as `--elastic` says it."""
SRUN = "SAMESTEP_SRUN"
"""Set by the same script: the words that start one rank on a node, without the node's name."""

_DEADLY = ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "SIGSYS", "SIGTRAP")


@dataclass(frozen=True, kw_only=True)
class Places:
    """The nodes on which ranks are started, and how many each has."""

    hosts: tuple[str, ...] = ()
    """None: this machine, without srun."""
    per_node: int = 0
    srun: tuple[str, ...] = ()
    address: str = LOOPBACK
    """Where ranks reach this process."""
    folder: Path
    """Which all nodes see: a rank leaves its failure there."""

    @property
    def num_ranks(self) -> int:
        """How many ranks there are at the start; 0 if the command says how many."""
        return len(self.hosts) * self.per_node

    def node_of(self, slot: int) -> int:
        """Return the number of the node that has a slot, counted from 0."""
        return slot // self.per_node if self.hosts else 0

    def error_file(self, member: int) -> Path:
        """Return the file in which a rank leaves its failure."""
        return self.folder / f".error-of-member-{member}.json"

    def start(
        self, member: int, slot: int, port: int, command: list[str]
    ) -> subprocess.Popen[bytes]:
        """Start a rank, or the srun that starts it."""
        most = max(member, slot, 1) + 1
        node = self.node_of(slot)
        variables = {
            **os.environ,
            MEMBER: str(member),
            "RANK": str(member),
            "WORLD_SIZE": str(most),
            "LOCAL_RANK": str(slot % self.per_node if self.hosts else slot),
            "LOCAL_WORLD_SIZE": str(self.per_node or most),
            "GROUP_RANK": str(node),
            "GROUP_WORLD_SIZE": str(len(self.hosts) or 1),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_ERROR_FILE": str(self.error_file(member)),
        }
        self.error_file(member).unlink(missing_ok=True)  # of an earlier start of the job
        if self.hosts:
            # The rank's parent is Slurm's, and this process's folder may be on another node.
            for name in (PARENT, FOLDER):
                variables.pop(name, None)
            command = [*self.srun, f"--nodelist={self.hosts[node]}", *command]
        return subprocess.Popen(command, env=variables, start_new_session=True)

    def death(self, member: int, slot: int, code: int) -> str:
        """Return the cause of a rank's death by its exit code; "" if it ended by itself."""
        number = -code if code < 0 else code - 128
        name = ""
        with contextlib.suppress(ValueError):
            name = signal.Signals(number).name
        if not self.hosts:
            return killed_by(name) if code < 0 else ""
        where = f" on {self.hosts[self.node_of(slot)]}"
        if name in _DEADLY:
            return killed_by(name) + where
        # A rank that fails says why. srun has codes of its own for a node that it cannot reach.
        ended_itself = code == 0 or name or self.error_file(member).exists()
        return "" if ended_itself else f"was lost{where}: srun ended with exit code {code}"

    def pass_on(self, process: subprocess.Popen[bytes], signum: int) -> None:
        """Let a rank know that it is to stop; Slurm, or the job's script, tells those of a job."""
        if not self.hosts:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signum)


_KILLS = {
    "SIGKILL": " (out of memory?)",
    "SIGABRT": " (did the ranks' collectives differ? --find-unused is for a model whose forward "
    "skips a part in some steps)",
}
"""Why a signal may have come: the kernel kills where memory runs out, Gloo aborts."""


def killed_by(name: str) -> str:
    """Say by which signal a rank was killed."""
    return f"was killed by {name}{_KILLS.get(name, '')}"


def places_of(folder: Path) -> Places:
    """Return the nodes that a job's script names; `folder` is this process's own."""
    if HOSTS not in os.environ:
        return Places(folder=folder)
    return Places(
        hosts=tuple(os.environ[HOSTS].split()),
        per_node=int(os.environ[PER_NODE]),
        srun=tuple(shlex.split(os.environ[SRUN])),
        address=os.environ["MASTER_ADDR"],
        folder=Path(os.environ[JOB_RUN]),
    )
