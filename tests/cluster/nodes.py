"""Lose a node of a sandbox, and bring it back."""

import re
import time
from datetime import datetime
from pathlib import Path
from signal import SIGKILL

from samestep.cluster.slurm import sandbox_daemons as daemons
from samestep.cluster.slurm.sandbox_cluster import status
from samestep.cluster.slurm.sandbox_daemons import Process, end, find_processes, send, wait_until

_BACK_WITHIN_S = 120.0


def kill_node(folder: Path, node: str) -> None:
    """Lose a node as if its power had failed: SIGKILL to its slurmd and to all that runs on it."""
    folder = folder.absolute().resolve()

    def on_node() -> list[Process]:
        return [process for process in find_processes(folder) if process.part == node]

    # The daemons first, lest slurmstepd tells the controller how its tasks ended.
    send(sorted(on_node(), key=lambda process: not process.name.startswith("slurm")), SIGKILL)
    end(on_node, 0)


def start_node(folder: Path, node: str) -> None:
    """Start the slurmd of a node that was lost, and wait until the node can run jobs again.

    One that runs is left alone.

    Raises:
        DaemonError: the node did not come back.
    """
    folder = folder.absolute().resolve()
    now = status(folder)
    if now.daemons[node] is not None:
        return
    started_at = time.time()
    daemons.start(folder, node)

    def is_back() -> bool:
        # The state alone may be that of the slurmd before, which the controller has not missed.
        if _registered_at(folder, node) < int(started_at):
            return False
        return daemons.node_states(folder).get(node) in ("idle", "mixed", "allocated")

    if not wait_until(is_back, _BACK_WITHIN_S):
        raise daemons.DaemonError(folder, node, f"{node} did not come back")


def _registered_at(folder: Path, node: str) -> float:
    """Return when the slurmd started that last registered as a node, in whole seconds of Unix time.

    It is 0 if none has, or the controller is silent.
    """
    said = daemons.ask(folder, "scontrol", "show", "node", node) or ""
    found = re.search(r"SlurmdStartTime=(\d\S+)", said)
    return datetime.fromisoformat(found[1]).astimezone().timestamp() if found else 0.0
