"""Start ranks on this machine through torchrun's elastic agent."""

import contextlib
import logging
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import samestep
from samestep.base.errors import UserError
from samestep.base.patches import patched
from samestep.base.run.directory import Run
from samestep.base.run.files import read_object, shown_path
from samestep.base.run.records import read_records
from samestep.base.startup import (
    PARENT,
    THREADS_WISHED,
    end_leftovers,
    stop_signals,
    unheeded_signal,
)
from samestep.launch.ranks.keeper import Elastic, Keeper, RunEnding
from samestep.launch.ranks.places import killed_by, places_of
from samestep.launch.ranks.process import LOST_CONTACT, STARTED_AT, TASK, print_error
from samestep.launch.ranks.watched import FOLDER, RUN, STALLED
from samestep.launch.ranks.watcher import VERDICT

_AGAIN_S: dict[int, float] = {signal.SIGINT: 0.0, signal.SIGTERM: 1.0}
"""A second signal of the same kind kills the ranks if it comes this long after the first."""

# -P: nothing in the user's folder may pose as a package.
_GUARD = """\
import shutil, sys
place, parent, session, folder = sys.argv[1:]
sys.path.append(place)
sys.stdin.read()
from samestep.base.startup import end_leftovers
end_leftovers(int(parent), int(session))
shutil.rmtree(folder, ignore_errors=True)
"""


@dataclass(frozen=True)
class Ended:
    """How ranks ended: the exit code, and a message about a failure, if any."""

    code: int
    message: str = ""


@dataclass
class _Stop:
    """The stop that is asked for, and where the command is meanwhile.

    A handler that raised anywhere could end in an `except Exception` of PyTorch's agent, and the
    ranks would continue. So once the agent looks after the ranks, it asks at each look.
    """

    first_at: dict[int, float] = field(default_factory=dict)
    """Each signal that came, in order → when it came first."""
    agent: Any = None
    """What looks after the ranks, once it does, and asks for a stop at each look."""

    def heed(self, signum: int, _frame: FrameType | None) -> None:
        """Note the first stop; at the second, kill.

        SIGTERM may come twice within a moment: from a scheduler, and a script that passes it on.
        """
        now = time.monotonic()
        if not self.first_at:
            self.first_at[signum] = now
            if self.agent is None:
                self.ask()
            return
        waited_s = now - self.first_at.setdefault(signum, now)
        if waited_s > _AGAIN_S.get(signum, math.inf):
            end_leftovers(os.getpid())

    def ask(self) -> None:
        """Raise `SignalException` if a stop has come."""
        for signum in self.first_at:
            raise SignalException(f"got signal {signum}", signal.Signals(signum))

    def monitored(self, monitor: Callable[..., Any], agent: Any, *more: Any) -> Any:
        """Run an agent's monitor of its ranks, unless a stop came first."""
        self.agent = agent
        self.ask()
        return monitor(agent, *more)

    def came_too_late(self) -> bool:
        """Whether there was nothing left to stop: ranks that stop agree, and none ends with 0."""
        context = getattr(self.agent, "_pcontext", None)
        handlers = getattr(context, "subprocess_handlers", {}).values()
        codes = [handler.proc.returncode for handler in handlers]
        return 0 in codes and not any(0 < code < 128 for code in codes if code is not None)


def start_ranks(
    num_ranks: int, arguments: list[str], task: str = "", elastic: Elastic | None = None
) -> int:
    """Do as `run_ranks`, print the first failure, and return the exit code."""
    ended = run_ranks(num_ranks, arguments, task, elastic)
    if ended.message:
        print_error(ended.message)
    return ended.code


def run_ranks(
    num_ranks: int, arguments: list[str], task: str = "", elastic: Elastic | None = None
) -> Ended:
    """Run `samestep` with these arguments on new ranks, which find `task` in `TASK`.

    A stop signal is passed on to the ranks and waited for; a second Ctrl-C or SIGTERM kills them.
    If a rank fails, the agent ends the others, unless it died and the ranks are `elastic`. Unless
    all ends well, nothing that the ranks started survives. Signals and variables are restored.
    """
    if unheeded_signal():
        return Ended(128 + unheeded_signal())  # no rank has begun, so none has to know
    variables, disabled = dict(os.environ), logging.root.manager.disable
    # The agent keeps them, and would raise its own exception where nothing expects it.
    stops = stop_signals() if threading.current_thread() is threading.main_thread() else []
    stop = _Stop()
    handlers = [(number, signal.signal(number, stop.heed)) for number in stops]
    # The agent's own accounts of a failure are for its developers; ours follows.
    logging.disable(logging.CRITICAL)
    os.environ |= {PARENT: str(os.getpid())} | ({TASK: task} if task else {})
    for name, value in {
        STARTED_AT: str(time.time()),
        # The ranks choose their threads themselves, unless the user has.
        THREADS_WISHED: os.environ.get("OMP_NUM_THREADS", ""),
        "OMP_NUM_THREADS": "1",
        # A stop may first have to write a checkpoint; the agent's own patience is 30 s.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600",
    }.items():
        os.environ.setdefault(name, value)
    try:
        with tempfile.TemporaryDirectory(prefix="samestep-") as folder, _guarded(folder):
            ended = _run_agent(num_ranks, arguments, elastic, folder, stop)
    except SignalException as error:  # no agent looked after the ranks yet
        ended = Ended(128 + int(error.sigval))
    try:
        if task and ended.code < 128:  # these ranks were a part of the work, which ends now
            ended = next((Ended(128 + signum) for signum in stop.first_at), ended)
        if ended.code:
            end_leftovers(os.getpid())
        return ended
    finally:
        for number, handler in handlers:
            signal.signal(number, handler)
        logging.disable(disabled)
        os.environ.clear()
        os.environ.update(variables)


@contextlib.contextmanager
def _guarded(folder: str) -> Iterator[None]:
    """Start a process that ends all that the ranks started, should this one be killed.

    It then deletes the folder, too.
    """
    place, own = str(Path(samestep.__file__).parent.parent), str(os.getpid())
    guard = subprocess.Popen(
        [sys.executable, "-P", "-c", _GUARD, place, own, str(os.getsid(0)), folder],
        stdin=subprocess.PIPE,  # it closes when this process ends, however that happens
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        guard.kill()
        guard.communicate()


def _run_agent(
    num_ranks: int, arguments: list[str], elastic: Elastic | None, folder: str, stop: _Stop
) -> Ended:
    os.environ[FOLDER] = folder
    try:
        if elastic is not None:
            stop.agent = elastic  # the keeper asks by itself
            where = Path(folder)
            signum = Keeper(arguments, where, elastic, places_of(where), stop.ask).keep(num_ranks)
            return Ended(128 + signum if signum else 0)
        launch = elastic_launch(_agent(num_ranks, folder), sys.executable)
        with patched((LocalElasticAgent, "_monitor_workers", stop.monitored)):
            launch("-m", "samestep", *arguments)
    except ChildFailedError as error:
        hung = _hung(Path(folder, VERDICT))
        return hung or _recorded(_first_failure(error, num_ranks), Path(folder, RUN))
    except RunEnding as ending:
        ended = Ended(1, f"{ending} {_continue('RUN')}")
        return _hung(Path(folder, VERDICT)) or _recorded(ended, Path(folder, RUN))
    except SignalException as error:
        return Ended(0 if stop.came_too_late() else 128 + int(error.sigval))
    return Ended(0)


def _agent(num_ranks: int, folder: str) -> LaunchConfig:
    """Configure torchrun's agent so that all ranks end with the first that fails."""
    return LaunchConfig(
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
        signals_to_handle="",  # they are handled already
    )


def _hung(file: Path) -> Ended | None:
    """Return the verdict of the ranks' watcher, if it has ended them."""
    verdict = read_object(file)
    if not verdict:
        return None
    message = f"{verdict['message']}."
    if verdict["run"]:
        message += f" {_continue(shown_path(Path(verdict['run'])))}"
    return Ended(STALLED, message)


def _continue(run: str) -> str:
    return f"Saved checkpoints are complete. Continue with: samestep train {run} --resume."


def _recorded(ended: Ended, where: Path) -> Ended:
    """Write the failure into the run if rank 0 knew only that it had lost another; return it.

    `where` is the file that says where the run is; all ranks have ended.
    """
    with contextlib.suppress(OSError, UserError):  # no run, or no room
        path = Path(where.read_text())
        result, records = read_object(path / "result.json"), [*read_records(path)]
        is_told = bool(records) and records[-1]["event"] == "stop"
        if ended.message and result.get("status") == "failed" and not is_told:
            reason = f"failed: {ended.message.splitlines()[0]}"
            with contextlib.closing(Run(path)) as run:
                run.append({"event": "stop", "step": result["steps"], "reason": reason})
                run.write_result(result | {"reason": reason})
    return ended


def _first_failure(error: ChildFailedError, num_ranks: int) -> Ended:
    # SIGTERM is how the agent ends the others: an effect, whatever the clock says.
    rank, failure = min(
        error.failures.items(),
        key=lambda item: (item[1].exitcode == -signal.SIGTERM, item[1].timestamp),
    )
    if failure.exitcode > 128:
        return Ended(failure.exitcode)  # stopped as it was asked to: nothing failed
    left = (failure.error_file_data or {}).get("message")
    stopped = "the other ranks were stopped."
    if isinstance(left, dict) and "errorCode" in left:
        ended = [r for r in range(num_ranks) if r not in error.failures]
        if ended and LOST_CONTACT in left["message"]:
            why = "ended with exit code 0 before the others, as os._exit(0) does"
            return Ended(1, f"Rank {ended[0]} {why}; {stopped} {_continue('RUN')}")
        code = int(left["errorCode"])
        prefix = f"[rank {rank}] " if rank and code == 1 else ""  # 2 is the same on every rank
        return Ended(code, prefix + left["message"])
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        return Ended(1, f"Rank {rank} {killed_by(name)}; {stopped} {_continue('RUN')}")
    log = f"rank-{rank}.log of the run directory" + (", or above" if rank == 0 else "")
    message = (
        f"Rank {rank} ended with exit code {failure.exitcode} and raised no error, as os._exit() "
        f"or a library that aborts does; {stopped} What it printed last is in {log}."
    )
    return Ended(2 if failure.exitcode == 2 else 1, message)
