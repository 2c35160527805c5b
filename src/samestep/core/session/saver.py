"""The checkpoints that a run writes: copied, written while the training continues, announced."""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

from samestep.base.errors import UserError
from samestep.base.run import checkpoints
from samestep.base.run.files import THEN_RESUME, cannot_write, sync_path
from samestep.base.run.host_copy import HostCopies
from samestep.base.run.index import (
    Entry,
    Index,
    Retention,
    announce,
    is_left,
    read_index,
    remove,
    shards_of,
)
from samestep.base.run.records import Record
from samestep.core.training.loop import checkpoint_name
from samestep.core.training.stopping import Watch
from samestep.core.training.work import Position
from samestep.launch.ranks.world import World


@contextmanager
def _cleared_on_error(file: Path) -> Iterator[None]:
    """Delete a checkpoint that could not be written or announced: it would fill the disk."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError, UserError):  # a disk that fails; the first error tells
            if file.name not in {entry.path for entry in read_index(file.parent).checkpoints}:
                remove(file)
        raise


class _Writing:
    """A checkpoint that a thread writes while the training continues."""

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


class Saver:
    """Writes the checkpoints of a run, one at a time.

    Every rank has one. Rank 0 writes, and of a sharded training each rank its own part.
    """

    def __init__(self, folder: Path, world: World, emit: Callable[[Record], None]) -> None:
        self._folder, self._world, self._emit = folder, world, emit
        self._index = Index()
        self._spared: list[str] = []
        self._copies = HostCopies()
        self._group: Any = None
        """What connects the threads of all ranks, once a sharded checkpoint was written."""
        self.writing: _Writing | None = None
        """The checkpoint that a thread writes, or has written since `settle`."""
        self._unwritten: list[UserError] = []
        self._told_undeleted = False

    def begin(self, step: int, watch: Watch | None) -> None:
        """Take over the index of a run that continues; all ranks call it.

        It forgets checkpoints after `step`, which were damaged, and values of another metric than
        the watched one, whose files are never deleted.
        """
        self._index = self._world.on_main(lambda: read_index(self._folder).up_to(step))
        if watch is not None and self._index.monitor != watch.metric:
            entries = self._index.checkpoints
            self._spared = [entry.path for entry in entries]
            unrated = tuple(replace(entry, metric=None) for entry in entries)
            self._index = replace(self._index, checkpoints=unrated)

    def save(
        self,
        content: dict[str, Any],
        position: Position,
        *,
        metric: float | None,
        watch: Watch | None,
        retention: Retention,
        began: float,
        sync: bool,
        sharded: bool = False,
    ) -> None:
        """Write and announce a checkpoint, delete others, emit its record.

        Rank 0 calls it; if `sharded`, all ranks do, each with its part of the tensors. Without
        `sync` it returns once the state is copied; a thread does the rest. `retention` says which
        checkpoints stay. `began` is when the caller began to save, by `time.perf_counter`.

        Raises:
            UserError: with `sync`, it cannot be written. Without, `settle_well` tells.
        """
        self.settle()
        name = self._new_name(position, sharded=sharded)
        content, parts = self._copied(content, sync=sync, sharded=sharded)
        epoch = position.epoch + (position.step_in_epoch > 0)  # the one it is in
        if metric is not None and not math.isfinite(metric):
            metric = None  # JSON has neither, and such a checkpoint cannot be the best
        entry = Entry(path=name, step=position.step, epoch=epoch, sha256="", metric=metric)
        record: Record = {"event": "checkpoint", "step": position.step}
        record["path"] = f"checkpoints/{name}"
        criterion: dict[str, Any] = {}
        if watch is not None:
            criterion = {"monitor": watch.metric, "mode": watch.mode}

        records = self._folder.parent / "events.jsonl"

        def write() -> None:
            with contextlib.suppress(OSError):  # it may have been deleted; then the write tells
                self._folder.mkdir(exist_ok=True)
            files: dict[str, str] = {}
            if sharded:
                from samestep.base.run import shards  # noqa: PLC0415 - half a second

                folder = self._folder / shards_of(name)
                hashes = shards.write(folder, parts, self._group)
                files = {f"{folder.name}/{file}": digest for file, digest in hashes.items()}
            if not self._world.is_main:
                return
            with _cleared_on_error(self._folder / name):
                digest = checkpoints.save(self._folder, name, content)
                try:
                    sync_path(records)  # what leads up to it, before it is announced
                except OSError as error:
                    raise cannot_write(records, error) from error
                index = replace(self._index, **criterion)
                complete = replace(entry, sha256=digest, files=files)
                self._index = announce(self._folder, index, complete, retention, self._spared)
            self._warn_undeleted()
            record["sha256"] = digest
            if "weights_sha256" in content:
                record["weights_sha256"] = content["weights_sha256"]
            record["seconds"] = time.perf_counter() - began

        if sync:
            write()
            if self._world.is_main:
                self._emit({**record, "blocked_seconds": record["seconds"]})
            return
        record["blocked_seconds"] = time.perf_counter() - began
        self.writing = _Writing(write, record)

    def _warn_undeleted(self) -> None:
        """Say once that checkpoints which are no longer kept are still on the disk."""
        left = [name for name in self._index.gone if is_left(self._folder, name)]
        if left and not self._told_undeleted:
            self._told_undeleted = True
            more = "samestep tries again after each checkpoint; check the disk and its permissions."
            say(self._world, f"warning: {self._folder / left[0]} could not be deleted. {more}")

    def _new_name(self, position: Position, *, sharded: bool) -> str:
        """Return a file name that no announced checkpoint has.

        A resumed run may save again where it was stopped. What is announced there stays whole until
        the index names the new file.
        """
        name = checkpoint_name(position)
        if any(entry.path == name for entry in self._index.checkpoints):
            name = name.replace(".pt", "_again.pt")
        return self._world.broadcast(name) if sharded else name

    def _copied(
        self, content: dict[str, Any], *, sync: bool, sharded: bool
    ) -> tuple[dict[str, Any], Mapping[str, Any]]:
        """Return rank 0's content and this rank's parts; without `sync` both are copies."""
        if not sharded:
            return content if sync else self._copies.take(content), {}
        from samestep.base.run import shards  # noqa: PLC0415 - half a second, only for FSDP

        self._group = self._group or self._world.gloo_group()
        content, parts = shards.split(content)
        if sync:
            return content, parts
        held = {"content": content if self._world.is_main else {}, "own": shards.local_parts(parts)}
        held = self._copies.take(held)
        return held["content"], shards.with_parts(parts, held["own"])

    def emit_written(self) -> None:
        """Emit the record of a checkpoint that was announced meanwhile."""
        if self.writing is not None and not self.writing.thread.is_alive():
            self.settle()

    def settle(self) -> None:
        """Wait until the checkpoint that is being written is announced, or has failed.

        A failure that a user can mend is kept for `settle_well`, and said once.
        """
        writing, self.writing = self.writing, None
        if writing is None:
            return
        writing.thread.join()
        error = writing.error
        if error is None:
            self._emit(writing.record)
        elif isinstance(error, UserError):
            if not self._unwritten:
                helps = f"{error.remedy.partition(THEN_RESUME)[0].rstrip('.')}."
                remark = "; earlier checkpoints are intact" if self._index.checkpoints else ""
                more = f"The training continues{remark}. {helps}"
                say(self._world, f"warning: {error.what} {more}")
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


def say(world: World, text: str) -> None:
    """Print a line on rank 0's standard error."""
    if world.is_main:
        with contextlib.suppress(OSError):  # a log on a full disk
            print(f"samestep: {text}", file=sys.stderr, flush=True)  # noqa: T201 - a user's script
