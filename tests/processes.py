"""Run a function, or the command line, on N real processes: tenths of a second each.

A fork server imports torch once; each process is forked from it, so that a test of several ranks
costs about as much as a function call. Nothing is ever forked from pytest's own process.
"""

import contextlib
import faulthandler
import itertools
import multiprocessing
import os
import socket
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parent.parent
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.preloaded"])

TIMEOUT_S = 1200.0
"""Ends what hangs, and nothing that is only slow: a busy machine takes many times as long."""


# Below those that Linux hands out for outgoing connections: one of these could take a port between
# its choice and its use. Who takes one holds the UDP port of that number: other pytest processes
# of this machine, of other runs too, then pass it over.
_ports = itertools.islice(itertools.cycle(range(30_000, 32_500)), os.getpid() % 2_500, None)
_held: deque[int] = deque()


def free_port() -> int:
    """Return a port that is free, and that no other test takes soon."""
    for port in _ports:
        held = socket.socket(type=socket.SOCK_DGRAM)
        with socket.socket() as probe, contextlib.suppress(OSError):
            held.bind(("127.0.0.1", port))
            probe.bind(("127.0.0.1", port))
            _held.append(held.detach())
            if len(_held) > 100:
                os.close(_held.popleft())
            return port
        held.close()
    raise AssertionError


def env(text: str) -> dict[str, str]:
    """Return variables that are written as a shell's."""
    return dict(pair.split("=", 1) for pair in text.split())


def launch_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun gives a rank of one node."""
    place = f"RANK={rank} LOCAL_RANK={rank} WORLD_SIZE={world_size} LOCAL_WORLD_SIZE={world_size}"
    return env(f"{place} GROUP_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT={port}")


@dataclass
class Ranks:
    processes: list[BaseProcess]
    folder: Path

    def wait(self, timeout_s: float = TIMEOUT_S) -> list[int]:
        """Return the exit codes once all have ended; a killed rank's is negative."""
        for process in self.processes:
            process.join(timeout_s)
        assert all(p.exitcode is not None for p in self.processes), self.output()
        return [int(p.exitcode or 0) for p in self.processes]

    def output(self) -> str:
        return "\n".join(self.printed(rank) for rank in range(len(self.processes)))

    def printed(self, rank: int) -> str:
        """Return what one rank printed, standard output and error together."""
        return (self.folder / f"output-{rank}.txt").read_text()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()


def ensure_server() -> None:
    """Start the fork server if there is none yet: from here, where it finds tests.preloaded."""
    with contextlib.chdir(_ROOT):
        forkserver.ensure_running()


def start_ranks(function: Callable[..., Any], world_size: int, folder: Path, *args: Any) -> Ranks:
    """Start `function(*args)` on N ranks, alone with no launcher's variables if N is 1."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    processes: list[BaseProcess] = []
    ensure_server()
    for rank in range(world_size):
        variables = launch_environment(rank, world_size, port) if world_size > 1 else {}
        process = _context.Process(
            target=_main, args=(function, args, variables, folder, rank), daemon=False
        )
        process.start()
        processes.append(process)
    return Ranks(processes, folder)


def run_ranks(function: Callable[..., Any], world_size: int, folder: Path, *args: Any) -> list[Any]:
    """Call `function(*args)` on N ranks and return what each returned, in rank order."""
    import torch

    ranks = start_ranks(_and_keep, world_size, folder, function, folder, args)
    codes = ranks.wait()
    assert codes == [0] * world_size, ranks.output()
    return [torch.load(folder / f"value-{r}.pt", weights_only=False) for r in range(world_size)]


def _and_keep(function: Callable[..., Any], folder: Path, args: tuple[Any, ...]) -> None:
    import torch

    rank = int(os.environ.get("RANK", "0"))
    torch.save(function(*args), folder / f"value-{rank}.pt")


def _main(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    variables: dict[str, str],
    folder: Path,
    rank: int,
) -> None:
    assert "tests.preloaded" in sys.modules, "the fork server says nothing if it cannot import it"
    # A rank's loader workers are forked, as Linux starts them; the fork server's would be spawned.
    multiprocessing.set_start_method("fork", force=True)
    os.setsid()  # a test may kill a whole job by its group, never by name
    output = os.open(folder / f"output-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(variables)
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")  # what images remember is not the user's
    if (loaded := sys.modules.get("lightning.fabric.utilities.rank_zero")) is not None:
        # It read RANK as the fork server imported it: each rank took itself for rank 0, and two
        # loggers that count the folders beside them gave a run two versions.
        loaded.rank_zero_only.rank = rank
    # A lost collective shows where every rank stands instead of hanging the tests.
    faulthandler.dump_traceback_later(TIMEOUT_S - 5, exit=True)
    try:
        function(*args)
    finally:
        faulthandler.cancel_dump_traceback_later()
        with contextlib.suppress(ValueError):
            sys.stdout.flush()
