"""Run the trainings of a sweep on this machine, some at once, each in a process of its own."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, BinaryIO

from samestep.base.errors import UserError
from samestep.base.run.files import Held, hold, read_object
from samestep.base.startup import TIED_TO, stop_signals
from samestep.base.words import measured
from samestep.cluster.sweeping.sweep_plan import LOGS, OptunaChoice, SweepPlan
from samestep.launch.ranks.nproc import check_ranks, cores, ranks_to_start

_POLL_EVERY_S = 0.1
_SHOWN_LINES = 12

Command = Callable[[str], tuple[list[str], Mapping[str, str]]]
"""A training's name → the words behind `samestep`, and more variables for its process."""


@dataclass(frozen=True)
class EndedTraining:
    """How one training of a sweep ended."""

    name: str
    status: str  # completed, stopped or failed
    text: str = ""  # its best value, or what it said when it failed


@dataclass(frozen=True)
class _Running:
    process: subprocess.Popen[bytes]
    place: int


def num_at_once(
    asked: int | None, nproc: int, device: str, *, oversubscribe: bool
) -> tuple[int, int]:
    """Return the number of trainings at once, and the GPUs of each; UserError if it is too many."""
    gpus = 0
    if device in ("auto", "cuda"):
        import torch  # noqa: PLC0415

        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    most = gpus or ranks_to_start("auto", "cpu")
    at_once = asked or max(1, most // nproc)
    if not gpus:
        check_ranks(at_once * nproc, oversubscribe=oversubscribe, flag="--at-once × --nproc")
    elif at_once * nproc > gpus and not oversubscribe:
        raise UserError(
            f"--at-once {at_once} × --nproc {nproc} is more than {gpus} GPUs. Add --oversubscribe."
        )
    return at_once, nproc if at_once * nproc <= gpus else 0


def hold_sweep(sweep: SweepPlan) -> BinaryIO:
    """Hold a sweep until the file is closed; raise UserError if another process runs it."""
    (sweep.folder / LOGS).mkdir(parents=True, exist_ok=True)
    try:
        return hold(sweep.folder / ".sweep.lock")
    except Held as owner:
        raise UserError(
            f"The sweep in {sweep.folder} is running already, in {owner}. Wait for its end, or "
            "name another folder with --run-dir."
        ) from None


def run_here(
    sweep: SweepPlan,
    command: Command,
    at_once: int,
    report: Callable[[EndedTraining], None],
    *,
    gpus: int = 0,
    chooser: OptunaChoice | None = None,
) -> int:
    """Run what has not completed yet; return 0, 1 if one failed, or 128 + the signal that ended it.

    A `chooser` says which comes next, by how those before ended. A stop signal is passed on to all
    trainings, which save and end; a second one kills them.
    """
    held = hold_sweep(sweep)
    names: Iterator[str] = (n for n in sweep.points if sweep.status(n) != "completed")
    if chooser is not None:
        names = iter(chooser.next, "")
    running: dict[str, _Running] = {}
    failed = False
    with held, _passing_on_signals(running) as received:
        while True:
            while len(running) < at_once and not received and (name := next(names, "")):
                taken = {training.place for training in running.values()}
                place = next(k for k in range(at_once) if k not in taken)
                running[name] = _start(sweep, name, command, place, at_once, gpus=gpus)
                if received:  # it came before this one could receive it
                    running[name].process.send_signal(received[-1])
            if not running:
                break
            time.sleep(_POLL_EVERY_S)
            for name, training in [*running.items()]:
                if (code := training.process.poll()) is not None:
                    del running[name]
                    ended = _ended(sweep, name, code, received)
                    if chooser is not None:
                        chooser.ended(name)
                    failed |= ended.status == "failed"
                    report(ended)
    if len(received) > 1:
        return 128 + signal.SIGKILL
    return 128 + received[0] if received else int(failed)


def _start(
    sweep: SweepPlan, name: str, command: Command, place: int, at_once: int, *, gpus: int
) -> _Running:
    words, more = command(name)
    variables = {**os.environ, **more, TIED_TO: str(os.getpid())}
    # Trainings that each took all cores would wait for one another.
    variables.setdefault("OMP_NUM_THREADS", str(max(1, cores() // at_once)))
    if gpus:
        visible = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
        numbers = range(place * gpus, (place + 1) * gpus)
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(
            visible[n] if visible else str(n) for n in numbers
        )
    with (sweep.folder / LOGS / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "samestep", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=variables,
            start_new_session=True,  # else Ctrl-C reaches it twice
        )
    return _Running(process, place)


@contextlib.contextmanager
def _passing_on_signals(running: Mapping[str, _Running]) -> Iterator[list[int]]:
    """Pass stop signals on to the trainings; yield those received; kill what is left."""
    received: list[int] = []

    def handle(signum: int, _frame: FrameType | None) -> None:
        for training in running.values():
            with contextlib.suppress(ProcessLookupError):
                training.process.send_signal(signal.SIGKILL if received else signum)
        received.append(signum)

    is_main = threading.current_thread() is threading.main_thread()
    before = [(s, signal.signal(s, handle)) for s in stop_signals()] if is_main else []
    try:
        yield received
    finally:
        for training in running.values():
            training.process.kill()
            training.process.wait()
        for number, handler in before:
            signal.signal(number, handler)


def _ended(sweep: SweepPlan, name: str, code: int, received: Sequence[int]) -> EndedTraining:
    result = read_object(sweep.run_dir(name) / "result.json")
    if code == 0:
        halved = ", ended by --halving" if result.get("reason") == "successive halving" else ""
        return EndedTraining(name, "completed", best_text(result) + halved)
    if code > 128 and result.get("status") == "stopped":
        return EndedTraining(name, "stopped", "saved; the same command continues")
    if code in [end for signum in received[:1] for end in (-signum, 128 + signum)]:
        return EndedTraining(name, "stopped", "with nothing saved yet; the same command starts it")
    log = sweep.folder / LOGS / f"{name}.log"
    lines = log.read_text(errors="replace").splitlines()
    error_at = next((n for n, line in enumerate(lines) if re.match("samestep: |╭─", line)), None)
    shown = lines[-_SHOWN_LINES:] if error_at is None else lines[error_at:][:_SHOWN_LINES]
    end = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return EndedTraining(name, "failed", "\n".join([f"{end}; all it printed: {log}", *shown]))


def best_text(result: Mapping[str, Any]) -> str:
    """Return the best value of a run's result as text; empty if there is none."""
    best = result.get("best") or {}
    value = best.get("value")
    return f"{best.get('metric')} {measured(value)}" if isinstance(value, int | float) else ""
