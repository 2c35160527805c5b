"""Check a script: copy its folder, run it on a few ranks under watch, and judge what was seen."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import samestep.checking.rules  # noqa: F401 - registers them
from samestep.checking.check_report import CheckReport
from samestep.checking.events import RankSeen, Seen, read_events
from samestep.checking.findings import judge, without_silenced
from samestep.checking.job import Job, write_job
from samestep.errors import UserError

_LOOK_EVERY_S = 0.05
_POLITE_S = 3.0
_FIRST_STEP_WITHIN_S = 120.0
_MOST_COPIED = 1 << 20


class Process(Protocol):
    """One rank's process, as of `subprocess`."""

    pid: int

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""

    def terminate(self) -> None:
        """Send SIGTERM."""

    def kill(self) -> None:
        """Send SIGKILL."""


Starter = Callable[[Path, Sequence[dict[str, str]], Path], list[Process]]
"""Starts a process for each mapping of variables on the job at a path, in a folder."""


def check_script(
    script: Path,
    arguments: Sequence[str] = (),
    *,
    nproc: int = 2,
    module: bool = False,
    steps: int = 10,
    seconds: float = 40.0,
    asked: bool = True,
    start: "Starter | None" = None,
) -> CheckReport:
    """Run a script on new ranks under watch and return what is wrong with it.

    `seconds` are counted from the first optimizer step; then the ranks are ended, and what they
    would have done later counts as not seen.

    Raises UserError if the script cannot be checked: it fails by itself, or takes no step.
    """
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="samestep-check-") as place:
        scratch, folder = Path(place) / "scratch", Path(place) / "seen"
        folder.mkdir()
        home = Path.cwd() if module else script.resolve().parent
        copy_folder(home, scratch)
        job = Job(
            script=str(script) if module else str(scratch / script.name),
            arguments=list(arguments),
            module=module,
            scratch=str(scratch),
            folder=str(folder),
            steps=steps,
        )
        path = write_job(job)
        variables = rank_variables(nproc)
        processes = (start or start_processes)(path, variables, scratch)
        codes = _wait(processes, folder, seconds)
        output = [(folder / f"output-{rank}.txt").read_text() for rank in range(nproc)]
        ranks = [
            RankSeen(rank=rank, events=read_events(folder, rank), exit_code=codes[rank])
            for rank in range(nproc)
        ]
    seen = Seen(ranks=ranks, folder=home, asked=asked)
    _refuse_failures(seen, output, script)
    found, not_seen = judge(seen)
    findings = without_silenced(found, home)
    return CheckReport(
        findings=findings,
        not_seen=not_seen,
        steps=max(rank.steps for rank in ranks),
        seconds=time.perf_counter() - began,
        notes=seen.notes,
        output=output,
        ranks=nproc,
        script=str(script),
        folder=home,
        silenced=len(found) - len(findings),
    )


def rank_variables(nproc: int) -> list[dict[str, str]]:
    """Return the variables that torchrun gives to each rank of one node."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "WANDB_MODE": "offline",
        "COMET_MODE": "offline",
        "COMET_OFFLINE_DIRECTORY": ".cometml-runs",
        "NEPTUNE_MODE": "offline",
        "CLEARML_OFFLINE_MODE": "1",
        "MLFLOW_TRACKING_URI": "file:./mlruns",
    }
    shared.setdefault("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    return [
        shared | {"RANK": str(r), "LOCAL_RANK": str(r), "ROLE_RANK": str(r)} for r in range(nproc)
    ]


def start_processes(job: Path, variables: Sequence[dict[str, str]], cwd: Path) -> list[Process]:
    """Start each rank as a Python of its own."""
    started: list[Process] = []
    for rank, own in enumerate(variables):
        with (job.parent / f"output-{rank}.txt").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "samestep.checking.rank", str(job)],
                cwd=cwd,
                env=os.environ | own,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        started.append(process)
    return started


def copy_folder(home: Path, scratch: Path) -> None:
    """Copy a script's folder; large files are links, and hidden folders are left out."""

    def copy(source: str, target: str) -> None:
        if Path(source).stat().st_size > _MOST_COPIED:
            Path(target).symlink_to(source)
        else:
            shutil.copy2(source, target)

    ignored = shutil.ignore_patterns(".*", "__pycache__", "node_modules", "venv", "env")
    shutil.copytree(home, scratch, copy_function=copy, ignore=ignored, symlinks=True)


def _wait(processes: Sequence[Process], folder: Path, seconds: float) -> list[int | None]:
    """Wait until all ranks have ended, or end them; return the exit codes of those that ended."""
    began = time.monotonic()
    first_step: float | None = None
    while any(process.poll() is None for process in processes):
        time.sleep(_LOOK_EVERY_S)
        now = time.monotonic()
        if first_step is None and _has_stepped(folder, len(processes)):
            first_step = now
        patience = _FIRST_STEP_WITHIN_S if first_step is None else seconds
        if now - (first_step or began) > patience:
            break
    codes = [process.poll() for process in processes]
    for signum in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + _POLITE_S
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signum)
        while time.monotonic() < until and any(p.poll() is None for p in processes):
            time.sleep(_LOOK_EVERY_S)
    return codes


def _has_stepped(folder: Path, nproc: int) -> bool:
    return any(event.step for rank in range(nproc) for event in read_events(folder, rank))


def _refuse_failures(seen: Seen, output: Sequence[str], script: Path) -> None:
    """Raise UserError for a script that fails by itself."""
    failed = next((rank for rank in seen.ranks if rank.exit_code), None)
    if failed is not None:
        end = failed.first("end")
        told = (end["text"] if end is not None else "") or output[failed.rank]
        raise UserError(
            f"{script} ended with exit code {failed.exit_code} on rank {failed.rank} after "
            f"{failed.steps} steps, so it could not be checked:\n{told.rstrip()}"
        )
