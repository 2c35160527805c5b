"""Write the checkpoints of a run, and go on from the newest."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from samestep.errors import UserError
from samestep.execution.request import Request
from samestep.run import checkpoints
from samestep.run.directory import is_run
from samestep.run.index import Entry, announce, read_index
from samestep.run.records import Record, read_records
from samestep.training.snapshot import capture, restore
from samestep.training.work import State, Work

Write = Callable[[str, float | None, dict[str, Any]], Record]


def make_writer(work: Work, state: State, path: Path) -> Write:
    """Return what writes and announces a checkpoint of a run that goes on from where it stands."""
    folder = path / "checkpoints"
    # Those of later steps were passed over as damaged, and their steps are trained again.
    step = state.position.step
    index = work.world.on_main(lambda: read_index(folder).up_to(step))

    def write(name: str, metric: float | None, content: dict[str, Any]) -> Record:
        nonlocal index
        step = state.position.step
        digest = checkpoints.save(folder, name, content)
        epoch = content["position"]["epoch"]
        if metric is not None and not math.isfinite(metric):
            metric = None  # JSON has neither, and such a checkpoint is no candidate for the best
        entry = Entry(path=name, step=step, epoch=epoch, sha256=digest, metric=metric)
        index = replace(index, monitor=state.watch.metric, mode=state.watch.mode)
        index = announce(folder, index, entry, work.settings.keep_top_k)
        return {
            "event": "checkpoint",
            "step": step,
            "path": f"checkpoints/{name}",
            "sha256": digest,
        }

    return write


def make_saver(
    request: Request, work: Work, state: State, write: Write
) -> Callable[[str, float | None], Record]:
    """Return what all ranks call to save where the training stands."""

    def save(name: str, metric: float | None) -> Record:
        started = time.perf_counter()
        content = capture(work, state, request.recipe.name)
        record = work.world.on_main(lambda: write(name, metric, content))
        return {**record, "seconds": time.perf_counter() - started}

    return save


def resume(request: Request, work: Work, state: State, path: Path) -> tuple[str, list[str]] | None:
    """Go on from the newest whole checkpoint; return its name and what was passed over."""
    world = work.world
    if not request.resume or not world.on_main(lambda: is_run(path)):
        return None
    # Rank 0 chooses, so that all ranks take the same file; each then reads it for itself.
    found = world.on_main(lambda: _newest(path))
    if found is None:
        return None
    entry, problems = found
    saved = world.on_every(lambda: checkpoints.load(path / "checkpoints", entry))
    restore(work, state, request.recipe.name, saved)
    return entry.path, problems


def _newest(path: Path) -> tuple[Entry, list[str]] | None:
    found = checkpoints.load_newest(path / "checkpoints")
    if found is None and any(r["event"] == "checkpoint" for r in read_records(path)):
        raise UserError(
            f"{path / 'checkpoints' / 'index.json'} names no checkpoint, though the run announced "
            "some. Restore it from a backup, or start a new run."
        )
    return (found[0], found[2]) if found else None
