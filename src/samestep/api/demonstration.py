"""What `samestep demo` does: a training on one rank, and the same one killed and resumed on others.

It goes the ways that a user goes: `samestep.train`, and the command line in processes of its own,
which are killed for good.
"""

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil

from samestep.api.trained_run import TrainedRun
from samestep.api.training import train
from samestep.comparison.same_training import SameTraining
from samestep.comparison.side_by_side import compare_runs
from samestep.errors import UserError
from samestep.run.records import Record
from samestep.settings import flag_name

SETTINGS: dict[str, Any] = {
    "epochs": 10,
    "batch_size": 192,
    "virtual_ranks": 6,
    "lr": 0.004,
    "log_every": 1,
}
STEPS = 370
KILL_AT = STEPS // 2 + 8
"""A step between two checkpoints: what came after the last of them has to be trained again."""
_LOOK_EVERY_S, _PATIENCE_S = 0.02, 300.0


@dataclass(frozen=True, kw_only=True)
class Killed:
    """A training that was killed."""

    path: Path
    step: int
    """The last one that it wrote down."""
    checkpoint: int
    """The step of its newest checkpoint."""
    processes: int


def flags(run: Path, nproc: int) -> list[str]:
    """Return the command line of the demo's training."""
    given = {**SETTINGS, "nproc": nproc, "run_dir": run}
    words = (word for name, value in given.items() for word in (f"--{flag_name(name)}", str(value)))
    return ["train", "spiral", *words]


def train_whole(run: Path) -> TrainedRun:
    """Train on one rank, in this process."""
    return train("spiral", run_dir=run, quiet=True, **SETTINGS)


def train_and_kill(run: Path, nproc: int) -> Killed:
    """Train on ranks of their own, and kill every process of it by SIGKILL, between checkpoints.

    Raises:
        UserError: the training ended before.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "samestep", *flags(run, nproc)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _await_step(run, process)
    finally:
        killed = _kill(process)
    steps = [record["step"] for record in _records(run, "step")]
    saved = [record["step"] for record in _records(run, "checkpoint")]
    return Killed(path=run, step=max(steps), checkpoint=max(saved), processes=killed)


def resume(run: Path, nproc: int) -> TrainedRun:
    """Go on with it on another number of ranks."""
    return train(run, resume=True, nproc=nproc, quiet=True)


def proof(one: TrainedRun, other: TrainedRun) -> SameTraining:
    """Compare each loss, and the weights at the end."""
    (alike,) = compare_runs([one.path, other.path]).alike
    return alike


def _await_step(run: Path, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not any(record["step"] >= KILL_AT for record in _records(run, "step")):
        if process.poll() is not None or time.monotonic() > deadline:
            told = process.communicate()[1].strip() if process.poll() is not None else "it hangs"
            raise UserError(f"The training on several ranks did not get to step {KILL_AT}: {told}")
        time.sleep(_LOOK_EVERY_S)


def _kill(process: "subprocess.Popen[str]") -> int:
    """Kill a process and all that it has started; return how many were there."""
    try:
        victims = [*psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        victims = []
    process.kill()
    for victim in victims:
        try:
            victim.kill()
        except psutil.NoSuchProcess:
            continue  # it went with the one that started it
    process.wait()
    psutil.wait_procs(victims, timeout=10)
    return 1 + len(victims)


def _records(run: Path, event: str) -> list[Record]:
    """Return the whole lines of one kind, while another process writes them."""
    try:
        lines = (run / "events.jsonl").read_bytes().split(b"\n")[:-1]
    except OSError:
        return []
    start = f'{{"event": "{event}"'.encode()
    return [msgspec.json.decode(line) for line in lines if line.startswith(start)]
