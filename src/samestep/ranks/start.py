"""Start ranks on this machine through torchrun's elastic agent."""

import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

import psutil
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from samestep.ranks.failure import STARTED_AT, TASK, print_error
from samestep.ranks.limits import THREADS_WISHED
from samestep.ranks.startup import PARENT, stop_signals, unheeded_signal


@dataclass(frozen=True)
class Ended:
    """How ranks ended: an exit code, and what to tell the user of a failure, if anything."""

    code: int
    message: str = ""


def start_ranks(num_ranks: int, arguments: list[str], task: str = "") -> int:
    """Do as `run_ranks`, print the first failure, and return the exit code."""
    ended = run_ranks(num_ranks, arguments, task)
    if ended.message:
        print_error(ended.message)
    return ended.code


def run_ranks(num_ranks: int, arguments: list[str], task: str = "") -> Ended:
    """Run `samestep` with these arguments on each of some new ranks, which find a task as `TASK`.

    A stop signal is passed on to the ranks and waited for; a second Ctrl-C kills them. If a
    rank fails, the agent ends the others. Signals and variables are then as they were before.
    """
    if unheeded_signal():
        return Ended(128 + unheeded_signal())  # no rank has begun, so none has to be told
    variables, disabled = dict(os.environ), logging.root.manager.disable
    # The agent keeps them, and would raise its own exception where nobody expects it.
    kept = stop_signals() if threading.current_thread() is threading.main_thread() else []
    handlers = [signal.getsignal(number) for number in kept]
    if kept:
        signal.signal(signal.SIGINT, _interrupter())
    # The agent's own accounts of a failure are for its developers; ours follows.
    logging.disable(logging.CRITICAL)
    os.environ[PARENT] = str(os.getpid())
    os.environ.setdefault(STARTED_AT, str(time.time()))
    if task:
        os.environ[TASK] = task
    # The ranks choose their threads themselves, unless the user has.
    os.environ.setdefault(THREADS_WISHED, os.environ.get("OMP_NUM_THREADS", ""))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # A stop may first have to write a checkpoint; the agent's own patience is 30 s.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
    try:
        return _run_agent(num_ranks, arguments)
    finally:
        for number, handler in zip(kept, handlers, strict=True):
            signal.signal(number, handler)
        logging.disable(disabled)
        os.environ.clear()
        os.environ.update(variables)


def _interrupter() -> Callable[[int, FrameType | None], None]:
    """Return what handles Ctrl-C: the agent passes the first on and waits; the second kills."""
    before, pressed = {child.pid for child in _children()}, False

    def handle(signum: int, _frame: FrameType | None) -> None:
        nonlocal pressed
        if not pressed:
            pressed = True
            raise SignalException(f"got signal {signum}", signal.Signals(signum))
        for child in _children():
            if child.pid not in before:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()

    return handle


def _children() -> list[psutil.Process]:
    return psutil.Process().children()


def _run_agent(num_ranks: int, arguments: list[str]) -> Ended:
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
            signals_to_handle=",".join(s.name for s in stop_signals() if s != signal.SIGINT),
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
    # SIGTERM is how the agent ends the others: an effect, whatever the clock says.
    rank, failure = min(
        error.failures.items(),
        key=lambda item: (item[1].exitcode == -signal.SIGTERM, item[1].timestamp),
    )
    if failure.exitcode > 128:
        return Ended(failure.exitcode)  # stopped as it was asked to: nothing failed
    left = (failure.error_file_data or {}).get("message")
    if isinstance(left, dict) and "errorCode" in left:
        code = int(left["errorCode"])
        prefix = f"[rank {rank}] " if rank and code == 1 else ""  # 2 is the same on every rank
        return Ended(code, prefix + left["message"])
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return Ended(
            1,
            f"Rank {rank} was killed by {name}{hint}; the other ranks were stopped. Every "
            "announced checkpoint is whole: go on with samestep train RUN --resume.",
        )
    return Ended(
        2 if failure.exitcode == 2 else 1, f"Rank {rank} ended with exit code {failure.exitcode}."
    )
