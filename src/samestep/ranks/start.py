"""Start ranks on this machine through torchrun's elastic agent."""

import contextlib
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from samestep.ranks.failure import PARENT, STARTED_AT, print_error
from samestep.ranks.startup import held_warning


@dataclass(frozen=True)
class Ended:
    """How ranks ended: an exit code, and what to tell the user of a failure, if anything."""

    code: int
    message: str = ""


def start_ranks(num_ranks: int, arguments: list[str], started_at: float) -> int:
    """Run `samestep` with these arguments on each of some new ranks; return the exit code.

    A stop signal is passed on to the ranks and waited for; a second Ctrl-C ends all at once. If a
    rank fails, the agent ends the others, and the first failure is printed.
    """
    ended = run_ranks(num_ranks, arguments, started_at)
    if ended.message:
        print_error(ended.message)
    return ended.code


def run_ranks(num_ranks: int, arguments: list[str], started_at: float) -> Ended:
    """Do as `start_ranks`, and return what it would print."""
    # The agent's own accounts of a failure are for its developers; ours follows. This process
    # does nothing else, so nothing else is silenced.
    logging.disable(logging.CRITICAL)
    if held_warning():
        return Ended(128 + held_warning())  # no rank has begun, so none has to be told
    os.environ[PARENT] = str(os.getpid())
    os.environ[STARTED_AT] = str(started_at)
    # The ranks choose their threads themselves; torchrun would set 1 with a warning.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # A stop may first have to write a checkpoint; the agent's own patience is 30 s.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
    with tempfile.TemporaryDirectory(prefix="samestep-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            local_addr="127.0.0.1",
            # SIGUSR1 is what schedulers send ahead of the time limit.
            signals_to_handle="SIGTERM,SIGINT,SIGUSR1",
        )
        try:
            elastic_launch(config, sys.executable)("-m", "samestep", *arguments)
        except ChildFailedError as error:
            return _first_failure(error)
        except SignalException as error:
            return Ended(128 + int(error.sigval))
    return Ended(0)


def _first_failure(error: ChildFailedError) -> Ended:
    """Return the first failure, as a user is told of it."""
    rank, failure = min(error.failures.items(), key=lambda item: _order(item[1]))
    if failure.exitcode > 128:
        return Ended(failure.exitcode)  # stopped as it was asked to: nothing failed
    table = failure.error_file_data.get("message") if failure.error_file_data else None
    if isinstance(table, dict) and "errorCode" in table:
        unforeseen = int(table["errorCode"]) == 1  # a mistake is the same on every rank
        prefix = f"[rank {rank}] " if rank and unforeseen else ""
        return Ended(int(table["errorCode"]), prefix + table["message"])
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return Ended(
            1,
            f"Rank {rank} was killed by {name}{hint}; the other ranks were stopped. Every "
            "announced checkpoint is whole: go on with samestep train RUN --resume.",
        )
    code = 2 if failure.exitcode == 2 else 1
    return Ended(code, f"Rank {rank} ended with exit code {failure.exitcode}.")


def _order(failure: ProcessFailure) -> tuple[bool, int]:
    # SIGTERM is how the agent ends the others: an effect, whatever the clock says.
    return failure.exitcode == -signal.SIGTERM, failure.timestamp


@contextlib.contextmanager
def own_signals() -> Iterator[None]:
    """Give signals back to Python after `start_ranks`, for a command that goes on.

    The agent keeps them, and would raise its own exception where nobody expects it.
    """
    names = [name for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)]
    before = {name: signal.getsignal(getattr(signal, name)) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)
