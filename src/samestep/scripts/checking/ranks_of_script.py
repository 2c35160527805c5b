"""Start the ranks of a script that is checked, and wait for them: the part without PyTorch."""

import contextlib
import getpass
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from samestep.launch.stall.pulse import RAISED, RankPulse, read_pulses
from samestep.launch.stall.stacks import computed_s, inspect_ranks, working
from samestep.launch.stall.stall_verdict import StallVerdict, find_culprit, find_stall, patience
from samestep.scripts.checking import events as ev
from samestep.scripts.checking.scratch import Scratch
from samestep.scripts.checking.seen import RankSeen, read_events

_LOOK_EVERY_S = 0.05
_POLITE_S = 3.0
FIRST_STEP_WITHIN_S = 120.0
_LOOK_FOR_STALLS_EVERY_S, _DOUBTFUL_S = 0.5, 3.0
_STOPPED_S = 0.2  # then the others have noted the same step
_STEP = re.compile(rb'"step":[1-9]')
_LAUNCHERS = re.compile(
    "(LOCAL_|ROLE_|GROUP_)?(RANK|WORLD_SIZE)$|MASTER_(ADDR|PORT)$"
    "|TORCHELASTIC_|OMPI_|M?PI_|PMI|SLURM_"
)
"""What a launcher around `check` itself left; the ranks have their own."""
SPAWNS = "spawns"
"""A file that a rank makes when its script turns out to start ranks itself."""
STOPPED = "stopped"
"""A file that a rank makes where its job lets it stop, waiting to be killed."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a script under watch."""

    script: str
    """A file in the scratch copy, or with `module` the name of a module."""
    arguments: list[str] = []
    module: bool = False
    scratch: str = ""
    """The copy of the user's folder in which the script runs."""
    place: str = ""
    """Where the scratch copy of all that it may reach begins; empty if nothing is guarded."""
    began: float = 0.0
    """When the ranks were started, in seconds since 1970: newer files are the script's own."""
    folder: str = ""
    """Where the ranks write what was seen."""
    steps: int = 10
    """Batches of each of the first two epochs; then comes the last one of the epoch."""
    nproc: int = 1
    """Ranks; with `substitute` or `alone`, also the number of GPUs that the script sees."""
    substitute: bool = False
    """Whether calls for CUDA are answered by the CPU."""
    one_per_node: bool = False
    """Whether each rank seems to have a node, and a GPU, of its own."""
    alone: bool = False
    """Whether the script starts its ranks itself."""
    resumes: bool = False
    """Whether the training is compared with itself after a kill: its epochs have their length."""
    kill_from: int | None = None
    """Then each rank stops before the first step after a checkpoint of this step or a later one."""
    stop_at: int | None = None
    """Then each rank stops after this many steps at the latest."""


def write_job(job: Job) -> Path:
    """Write a job into its folder."""
    path = Path(job.folder) / "job.json"
    path.write_bytes(msgspec.json.encode(job))
    return path


def read_job(path: Path) -> Job:
    """Return a job that was written."""
    return msgspec.json.decode(path.read_bytes(), type=Job)


class RankProcess(Protocol):
    """One rank's process, as of `subprocess`."""

    pid: int

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""


Starter = Callable[[Path, Sequence[dict[str, str]], Path], list[RankProcess]]
"""Starts a process for each mapping of variables on the job at a path, in a folder."""
Run = Callable[[Scratch, Job], tuple[Sequence[int | None], StallVerdict | None]]
"""Runs all ranks of a job in a scratch copy: the exit codes of those that have ended, the stall."""
_Moves = dict[int, tuple[float, float]]  # by process: when it moved, what it had computed by then


def free_port() -> int:
    """Return a port on which nothing listens here."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return port


def rank_variables(nproc: int, *, one_per_node: bool = False) -> list[dict[str, str]]:
    """Return the variables that torchrun gives to each rank, of one node or of one each."""
    shared = {
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": "1" if one_per_node else str(nproc),
        "GROUP_WORLD_SIZE": str(nproc) if one_per_node else "1",
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "ACCELERATE_USE_CPU": "true",
    }
    names = ("RANK", "ROLE_RANK", "LOCAL_RANK", "GROUP_RANK")
    numbers = ((n, n, 0, n) if one_per_node else (n, n, n, 0) for n in range(nproc))
    return [shared | dict(zip(names, map(str, own), strict=True)) for own in numbers]


def script_variables(scratch: Scratch) -> dict[str, str]:
    """Return the variables of a script's processes: no GPU, no tracker server, a scratch folder."""
    real = tempfile.gettempdir()
    return {
        "CUDA_VISIBLE_DEVICES": "",
        **dict.fromkeys(("WANDB_MODE", "COMET_MODE", "NEPTUNE_MODE", "SWANLAB_MODE"), "offline"),
        "COMET_OFFLINE_DIRECTORY": ".cometml-runs",
        "MLFLOW_TRACKING_URI": "file:./mlruns",
        "AIM_REPO": ".",
        "TRACKIO_SPACE_ID": "",
        "CLEARML_OFFLINE_MODE": "1",
        **dict.fromkeys(("HF_HUB_DISABLE_TELEMETRY", "DISABLE_TELEMETRY"), "1"),
        "GIT_OPTIONAL_LOCKS": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "TMPDIR": scratch.temporary,
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get(
            "TORCHINDUCTOR_CACHE_DIR", f"{real}/torchinductor_{getpass.getuser()}"
        ),
    }


def start_processes(job: Path, variables: Sequence[dict[str, str]], cwd: Path) -> list[RankProcess]:
    """Start each rank as a Python of its own."""
    inherited = {name: value for name, value in os.environ.items() if not _LAUNCHERS.match(name)}
    return [start_rank(job, rank, inherited | own, cwd) for rank, own in enumerate(variables)]


def start_rank(job: Path, rank: int, variables: dict[str, str], cwd: Path) -> RankProcess:
    """Start one rank with only these variables."""
    with (job.parent / f"output-{rank}.txt").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "samestep.scripts.checking.rank", str(job)],
            cwd=cwd,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def run_ranks(
    scratch: Scratch, job: Job, *, seconds: float, stall_s: float | None, start: Starter | None
) -> tuple[Sequence[int | None], StallVerdict | None]:
    """Start a job in a scratch copy, and wait until its ranks have ended, or long enough."""
    folder = Path(job.folder)
    each = [{}] if job.alone else rank_variables(job.nproc, one_per_node=job.one_per_node)
    own = [script_variables(scratch) | variables for variables in each]
    processes = (start or start_processes)(write_job(job), own, Path(job.scratch))
    try:  # where each rank has a node of its own, what is asked for before the first step will do
        return wait(processes, folder, 0.0 if job.one_per_node else seconds, stall_s)
    finally:
        end(processes, politely=not job.one_per_node and not is_given_up(folder))


def is_given_up(folder: Path) -> bool:
    """Whether the ranks are to be killed: they start ranks of their own, or wait for the kill."""
    return (folder / SPAWNS).exists() or (folder / STOPPED).exists()


def wait(
    processes: Sequence[RankProcess],
    folder: Path,
    seconds: float,
    stall_s: float | None,
    *,
    looks: bool = True,
) -> tuple[list[int | None], StallVerdict | None]:
    """Wait until all ranks have ended or stalled, or long enough.

    Returns the exit codes of those that have ended, and why the others have stalled. Without
    `looks` nothing is asked of the processes of other ranks, which may be on other nodes.
    """
    until = time.monotonic() + FIRST_STEP_WITHIN_S
    look_at = 0.0
    moves: _Moves = {}
    stall = None
    stepped = failed = False
    while any(process.poll() is None for process in processes):
        time.sleep(_LOOK_EVERY_S)
        now = time.monotonic()
        if not stepped and any(_STEP.search(_tail(path)) for path in folder.glob("events-*")):
            stepped, until = True, now + seconds
        if not failed and any(process.poll() for process in processes):
            failed, until = True, min(until, now + _POLITE_S)  # others may wait for it in vain
        if looks and now > look_at and not failed:
            look_at = now + _LOOK_FOR_STALLS_EVERY_S
            pulses = [pulse for pulse in read_pulses(folder) if pulse.rank >= 0]
            stall = _stalled(folder, pulses, stall_s, moves)
            if pulses and now - max(pulse.moved for pulse in pulses) > _DOUBTFUL_S:
                until = max(until, look_at)  # is it a stall? That takes longer to tell.
        if (folder / STOPPED).exists():
            until = min(until, now + _STOPPED_S)
        if now > until or stall is not None or (folder / SPAWNS).exists():
            break
    codes = [process.poll() for process in processes]
    return codes, _failed_together(folder, codes) if looks and any(codes) else stall


def _failed_together(folder: Path, codes: Sequence[int | None]) -> StallVerdict | None:
    """Return the mismatch of ranks' calls, if a rank failed in a call that waits for others.

    Where one library waits for ever, another may find a message of a wrong size, and raise or
    abort. A rank that fails elsewhere fails by itself, and takes the others with it.
    """
    aborted = [rank for rank, code in enumerate(codes) if code == -signal.SIGABRT]
    pulses = [
        pulse.raised() if pulse.rank in aborted else pulse
        for pulse in read_pulses(folder)
        if pulse.rank >= 0
    ]
    raised = {pulse.rank for pulse in pulses if pulse.calls and pulse.calls[-1].state == RAISED}
    if any(pulse.code and pulse.rank not in raised for pulse in pulses):
        return None
    verdict = find_culprit(inspect_ranks(folder, pulses)) if raised and len(pulses) > 1 else None
    return None if verdict is None or verdict.cause == "unknown" else verdict


def _stalled(
    folder: Path, pulses: Sequence[RankPulse], stall_s: float | None, moves: _Moves
) -> StallVerdict | None:
    times = [seconds for pulse in pulses for seconds in pulse.step_times]
    least = stall_s or patience(times)
    for pulse in pulses:
        if moves.get(pulse.pid, (0.0, 0.0))[0] != pulse.moved:
            moves[pulse.pid] = pulse.moved, computed_s(pulse.pid)
    if not pulses or find_stall(pulses, least) is None:
        return None
    # On a busy machine little is computed in that time, by a rank or by a worker that it starts.
    busy = working([pulse.pid for pulse in pulses]).items()
    if any(computed - moves.get(pid, (0.0, 0.0))[1] < least for pid, computed in busy):
        return None
    stands = inspect_ranks(folder, pulses)
    # Ranks that all compute are slow, and none waits for another.
    return None if all(stand.doing == "computes" for stand in stands) else find_culprit(stands)


def end(processes: Sequence[RankProcess], *, politely: bool = True) -> None:
    """End the ranks that still run, and all that they started."""
    for signum in (signal.SIGTERM, signal.SIGKILL) if politely else (signal.SIGKILL,):
        until = time.monotonic() + _POLITE_S
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signum)
        while time.monotonic() < until and any(p.poll() is None for p in processes):
            time.sleep(_LOOK_EVERY_S)


def ranks_seen(folder: Path, codes: Sequence[int | None]) -> list[RankSeen]:
    """Return each rank's events and exit code; a script's own ranks record theirs."""
    own = list(range(len(codes)))
    if len(codes) == 1:
        numbers = [int(path.stem.removeprefix("events-")) for path in folder.glob("events-*")]
        own = sorted(number for number in numbers if number >= 0) or numbers or [0]
    seen = []
    for place, rank in enumerate(own):
        events = read_events(folder, rank)
        ended = next((event for event in events if isinstance(event, ev.RankEnded)), None)
        code = ended.code if ended is not None else None
        code = codes[place] if len(codes) == len(own) else code
        seen.append(RankSeen(rank=max(rank, 0), events=events, exit_code=code))
    return seen


def _tail(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            return file.read()
    except FileNotFoundError:  # renamed: the process has just learnt which rank it is
        return b""
