"""One run on this rank, from open to end: its directory, records, checkpoints and result.

`samestep train` with either engine and `samestep.open_run` write their runs through it.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from samestep.errors import AlreadyTold, UserError
from samestep.ranks import watched
from samestep.ranks.startup import JOB_RUN
from samestep.ranks.world import World
from samestep.run import checkpoints
from samestep.run.directory import Heartbeat, Run, is_run, versions
from samestep.run.host_copy import HostCopies
from samestep.run.index import Entry, Index, announce, read_index
from samestep.run.records import RUN_FORMAT, Record
from samestep.training.loop import checkpoint_name
from samestep.training.stopping import Watch
from samestep.training.work import Position

Show = Callable[[Record], None]


class _Writing:
    """A checkpoint that a thread writes while the training goes on."""

    def __init__(self, write: Callable[[], None], record: Record) -> None:
        self.record, self._write = record, write
        self.error: BaseException | None = None
        self.thread = Thread(target=self._run, name="checkpoint", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:  # it is raised where the training waits
            self.error = error


class Session:
    """An open run. Every rank has one; only rank 0 writes."""

    def __init__(
        self, path: Path, world: World, on_open: Callable[[Path], None], show: Show = lambda _: None
    ) -> None:
        """Open the run directory on rank 0, then call `on_open` with it on every rank.

        `show` gets each record on rank 0.
        """
        self.path, self.world, self._show = path, world, show
        self.run: Run | None = None
        """The open directory; None on other ranks."""
        self.begun = False
        """Whether this process has written its `start` record."""
        self.first_record_s: float | None = None
        """The time of the first record after `start` and `resume`, in seconds since the epoch."""
        self._early: list[Record] = []
        self._index = Index()
        self._spared: list[str] = []
        self._copies = HostCopies()
        self._writing: _Writing | None = None
        self._unwritten: list[UserError] = []
        world.on_main(self._open)
        world.on_every(lambda: _tell(on_open, path))
        watched.in_run(path)
        job = os.environ.get(JOB_RUN) if world.is_main else None
        self._heartbeat = Heartbeat(Path(job).absolute()) if job else None

    def _open(self) -> None:
        self.run = Run(self.path)

    def begin(self, start: Record, resume: Record | None, step: int, watch: Watch | None) -> None:
        """Write the `start` record and, when the run goes on, the `resume` record.

        The index forgets checkpoints after `step`, which were damaged, and values of another metric
        than the watched one, whose files are never deleted.
        """
        self._index = self.world.on_main(lambda: read_index(self._folder).up_to(step))
        if watch is not None and self._index.monitor != watch.metric:
            entries = self._index.checkpoints
            self._spared = [entry.path for entry in entries]
            unrated = tuple(replace(entry, metric=None) for entry in entries)
            self._index = replace(self._index, checkpoints=unrated)
        self.begun = True
        watched.turn_to(watched.FIRST_STEP)
        for record in (start, resume, *self._early):
            if record is not None:
                self.emit(record)

    def emit(self, record: Record) -> None:
        """Write a record and show it, on rank 0; records before `begin` wait for it."""
        if self.run is None:
            return
        if not self.begun:
            self._early.append(record)
            return
        if self._writing is not None and not self._writing.thread.is_alive():
            self.settle()
        event = record["event"]
        if self.first_record_s is None and event not in ("start", "resume"):
            self.first_record_s = time.time()
        if event in ("progress", "step"):
            self.beat()
        if event != "progress":
            self.run.append(record)
        self._show(record)

    def beat(self) -> None:
        """Show a job of Slurm that steps are taken."""
        if self._heartbeat is not None:
            self._heartbeat.beat()

    @property
    def _folder(self) -> Path:
        return self.path / "checkpoints"

    def save(
        self,
        content: dict[str, Any],
        position: Position,
        *,
        metric: float | None,
        watch: Watch | None,
        keep_top_k: int | None,
        keep_newest: int = 0,
        began: float,
        sync: bool,
    ) -> None:
        """Write and announce a checkpoint, delete others, emit its record; rank 0 only.

        Without `sync` it returns once the state is copied; a thread does the rest, one checkpoint
        at a time. The best `keep_top_k` are kept, the last, and the newest `keep_newest`; None
        keeps all. `began` is when the caller began to save, by `time.perf_counter`.

        Raises:
            UserError: with `sync`, it cannot be written. Without, `settle_well` tells.
        """
        self.settle()
        name = checkpoint_name(position)
        epoch = position.epoch + (position.step_in_epoch > 0)  # the one it is in
        if metric is not None and not math.isfinite(metric):
            metric = None  # JSON has neither, and such a checkpoint cannot be the best
        entry = Entry(path=name, step=position.step, epoch=epoch, sha256="", metric=metric)
        record: Record = {"event": "checkpoint", "step": position.step}
        record["path"] = f"checkpoints/{name}"
        weights = content.get("weights_sha256")
        monitored = None if watch is None else (watch.metric, watch.mode)
        copied = content if sync else self._copies.take(content)

        def write() -> None:
            digest = checkpoints.save(self._folder, name, copied)
            index = self._index
            if monitored is not None:
                index = replace(index, monitor=monitored[0], mode=monitored[1])
            newest = sorted(index.checkpoints, key=lambda old: -old.step)[: max(keep_newest - 1, 0)]
            spared = [*self._spared, *(old.path for old in newest)]
            whole = replace(entry, sha256=digest)
            self._index = announce(self._folder, index, whole, keep_top_k, spared)
            record["sha256"] = digest
            if weights is not None:
                record["weights_sha256"] = weights
            record["seconds"] = time.perf_counter() - began

        if sync:
            write()
            self.emit({**record, "blocked_seconds": record["seconds"]})
            return
        record["blocked_seconds"] = time.perf_counter() - began
        self._writing = _Writing(write, record)

    def settle(self) -> None:
        """Wait until the checkpoint that is being written is announced, or has failed.

        A failure that a user can mend is kept for `settle_well`, and said once.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        writing.thread.join()
        error = writing.error
        if error is None:
            self.emit(writing.record)
        elif isinstance(error, UserError):
            if not self._unwritten:
                more = "The training goes on; earlier checkpoints are whole. Free some space."
                say(self.world, f"warning: {error.what} {more}")
            self._unwritten.append(error)
        else:
            raise error

    def settle_well(self) -> None:
        """Wait for the last checkpoint.

        Raises:
            UserError: a checkpoint of this training could not be written.
        """
        self.settle()
        if self._unwritten:
            number = len(self._unwritten)
            count = "A checkpoint was" if number == 1 else f"{number} checkpoints were"
            last = self._unwritten[-1]
            raise UserError(f"{count} not written. {last.what}", remedy=last.remedy)

    def close(self) -> None:
        """Wait for the last checkpoint, then let another process open the run."""
        if self.run is not None:
            self.settle()
            self.run.close()


def _tell(on_open: Callable[[Path], None], path: Path) -> None:
    try:
        on_open(path)
    except OSError as error:
        raise UserError(
            f"{path} cannot be used here: {error.strerror}. Choose a run directory on a file "
            "system that all nodes share."
        ) from error


def refuse_taken(path: Path, remedy: str) -> None:
    """Refuse a directory that holds a run."""
    if is_run(path):
        raise UserError(f"{path} already holds a run.", remedy=remedy)


def start_record(
    world: World,
    *,
    recipe: str,
    run_dir: Path,
    parameters: Iterable[Tensor],
    notes: Iterable[str] = (),
    **more: Any,
) -> Record:
    """Return the record of an attempt's start; `more` are fields of the caller."""
    return {
        "event": "start",
        "format": RUN_FORMAT,
        "time": time.time(),
        "recipe": recipe,
        "run_dir": str(run_dir),
        **_ranks(world),
        "parameters": sum(p.numel() for p in parameters),
        **more,
        "notes": [*world.notes, *notes],
    }


def resume_record(world: World, step: int, checkpoint: str, problems: list[str]) -> Record:
    """Return the record of a resumed checkpoint; `problems` are those of newer files."""
    return {
        "event": "resume",
        "step": step,
        "checkpoint": checkpoint,
        "world_size": world.world_size,
        "problems": problems,
    }


def environment(world: World, **more: Any) -> dict[str, Any]:
    """Return what environment.json says of the ranks; `more` are fields of the caller."""
    return {"versions": versions(), **_ranks(world), **more}


def _ranks(world: World) -> dict[str, Any]:
    names = ("world_size", "num_nodes", "launcher", "backend")
    ranks = {name: getattr(world, name) for name in names}
    return {**ranks, "device": str(world.device), "threads": torch.get_num_threads()}


def run_result(
    world: World, position: Position, *, recipe: str, status: str, reason: str, **more: Any
) -> dict[str, Any]:
    """Return what result.json says of how a run ended; `more` are fields of the caller."""
    return {
        "recipe": recipe,
        "status": status,
        "reason": reason,
        "world_size": world.world_size,
        "epochs": position.epoch,
        "steps": position.step,
        "training_seconds": position.seconds,
        "samples_per_s": position.samples / position.seconds if position.seconds else 0.0,
        "device": str(world.device),
        "backend": world.backend,
        "versions": versions(),
        **more,
    }


class Stopped(AlreadyTold):
    """All ranks have agreed to stop on a signal, and have saved."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum


def say(world: World, text: str) -> None:
    """Print a line on rank 0's standard error."""
    if world.is_main:
        print(f"samestep: {text}", file=sys.stderr, flush=True)  # noqa: T201 - a user's own script
