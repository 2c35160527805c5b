"""Write the checkpoints of a run, and go on from the newest."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from samestep.errors import UserError
from samestep.ranks.world import World
from samestep.run import checkpoints
from samestep.run.directory import is_run
from samestep.run.index import Entry, announce, read_index, remove_unannounced
from samestep.run.records import Record, read_records
from samestep.session.changes import check_changes, words_of
from samestep.session.request import Request, to_toml
from samestep.training.snapshot import capture, restore
from samestep.training.work import State, Work

Write = Callable[[str, float | None, dict[str, Any]], Record]


def make_writer(work: Work, state: State, path: Path, made_with: str = "") -> Write:
    """Return what writes and announces a checkpoint of a run that goes on from where it stands.

    `made_with` is the text of the run's settings.toml; each checkpoint keeps it.
    """
    folder = path / "checkpoints"
    # Those of later steps were passed over as damaged, and their steps are trained again.
    step = state.position.step
    index = work.world.on_main(lambda: read_index(folder).up_to(step))
    spared: tuple[str, ...] = ()
    if index.monitor != state.watch.metric:  # values of another metric rank nothing
        spared = tuple(entry.path for entry in index.checkpoints)  # and cost no file
        entries = tuple(replace(entry, metric=None) for entry in index.checkpoints)
        index = replace(index, checkpoints=entries)

    def write(name: str, metric: float | None, content: dict[str, Any]) -> Record:
        nonlocal index
        step = state.position.step
        digest = checkpoints.save(folder, name, {**content, "made_with": made_with})
        position = content["position"]
        epoch = position["epoch"] + (position.get("step_in_epoch", 0) > 0)  # the one it is in
        if metric is not None and not math.isfinite(metric):
            metric = None  # JSON has neither, and such a checkpoint is no candidate for the best
        entry = Entry(path=name, step=step, epoch=epoch, sha256=digest, metric=metric)
        index = replace(index, monitor=state.watch.metric, mode=state.watch.mode)
        index = announce(folder, index, entry, work.settings.keep_top_k, spared)
        return {
            "event": "checkpoint",
            "step": step,
            "path": f"checkpoints/{name}",
            "sha256": digest,
            **{k: content[k] for k in ("weights_sha256",) if k in content},
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


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """What a run goes on from."""

    checkpoint: str
    """File name in checkpoints/."""
    problems: list[str]
    """What was wrong with newer ones."""
    changes: list[str]
    """What --allow-change has let differ from what the checkpoint was made with."""


def settings_text(request: Request, work: Work) -> str:
    """Return the settings of a run as its settings.toml has them."""
    plan = work.plan
    return to_toml(
        request, batch_size=plan.global_batch_size, micro_batch_size=plan.micro_batch_size
    )


def resume(request: Request, work: Work, state: State, path: Path) -> Resumed | None:
    """Go on from the newest whole checkpoint; return what it is, None where none is there."""
    world = work.world
    if not request.resume or not world.on_main(lambda: is_run(path)):
        return None
    found = load_newest(path, world)
    return None if found is None else go_on(request, work, state, path, found)


def go_on(
    request: Request,
    work: Work,
    state: State,
    path: Path,
    found: tuple[Entry, dict[str, Any], list[str]],
) -> Resumed:
    """Bring a training to where a run's checkpoint stands; return what it goes on from.

    `found` is what `load_newest` or `newest_whole` has returned.

    Raises:
        UserError: it would become another training.
    """
    world = work.world
    entry, saved, problems = found
    made_with, changes = saved.get("made_with"), {}
    if made_with:  # checkpoints of earlier versions do not say
        where = f"{path / 'checkpoints' / entry.path}"
        text = settings_text(request, work)
        changes = world.on_main(
            lambda: check_changes(made_with, text, request.recipe, request.allow_change, where)
        )
    restore(work, state, request.recipe.name, saved)
    told = [*words_of(changes), *(f"recipe: {name}" for name in request.recipe_changes)]
    return Resumed(checkpoint=entry.path, problems=problems, changes=told)


def load_newest(path: Path, world: World) -> tuple[Entry, dict[str, Any], list[str]] | None:
    """Return a run's newest whole checkpoint, its content, and what was wrong with newer ones.

    All ranks call it. What a kill has left half-announced is deleted.
    """
    # Rank 0 chooses, so that all ranks take the same file; each then reads it for itself.
    content: dict[str, Any] = {}

    def newest() -> tuple[Entry, list[str]] | None:
        found = newest_whole(path)
        if found is None:
            return None
        entry, saved, problems = found
        content.update(saved)
        return entry, problems

    found = world.on_main(newest)
    if found is None:
        return None
    entry, problems = found
    saved = world.on_every(lambda: content or checkpoints.load(path / "checkpoints", entry))
    world.on_main(lambda: _remove_unannounced(path))
    return entry, saved, problems


def _remove_unannounced(path: Path) -> None:
    records = list(read_records(path, superseded=True))
    announced = [Path(r["path"]).name for r in records if r["event"] == "checkpoint"]
    since = min((r["time"] for r in records if r["event"] == "start"), default=math.inf)
    remove_unannounced(path / "checkpoints", announced, since)


def newest_whole(path: Path) -> tuple[Entry, dict[str, Any], list[str]] | None:
    """Return what `load_newest` does, on one rank, and leave the directory as it is.

    Raises:
        UserError: the run announced checkpoints, and none is there.
    """
    found = checkpoints.load_newest(path / "checkpoints")
    if found is None and any(r["event"] == "checkpoint" for r in read_records(path)):
        raise UserError(
            f"{path / 'checkpoints' / 'index.json'} names no checkpoint, though the run announced "
            "some. Restore it from a backup, or start a new run."
        )
    return found
