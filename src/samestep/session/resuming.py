"""Go on with a run from its newest whole checkpoint."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from samestep.errors import UserError
from samestep.ranks.world import World
from samestep.run import checkpoints
from samestep.run.directory import is_run
from samestep.run.index import Entry, remove_unannounced
from samestep.run.records import read_records
from samestep.session.changes import check_changes, words_of
from samestep.session.request import Request, to_toml
from samestep.training.snapshot import restore
from samestep.training.work import State, Work


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """What a resumed run continues from."""

    checkpoint: str
    """File name in checkpoints/."""
    problems: list[str]
    """What was wrong with newer ones."""
    changes: list[str]
    """What --allow-change has let differ from what the checkpoint was made with."""


class Found(NamedTuple):
    """A checkpoint that was read."""

    entry: Entry
    content: dict[str, Any]
    problems: list[str]
    """What was wrong with newer ones."""


def settings_text(request: Request, work: Work) -> str:
    """Return the text of a run's settings.toml."""
    plan = work.plan
    return to_toml(
        request, batch_size=plan.global_batch_size, micro_batch_size=plan.micro_batch_size
    )


def resume(request: Request, work: Work, state: State, path: Path) -> Resumed | None:
    """Go on from the newest whole checkpoint; return None if there is none."""
    world = work.world
    if not request.resume or not world.on_main(lambda: is_run(path)):
        return None
    found = load_newest(path, world)
    return None if found is None else go_on(request, work, state, path, found)


def go_on(request: Request, work: Work, state: State, path: Path, found: Found) -> Resumed:
    """Restore a training from a checkpoint of a run; refuse what would make it another training."""
    made_with, changes = found.content.get("made_with"), {}
    if made_with:  # checkpoints of earlier versions do not say
        where, now = f"{path / 'checkpoints' / found.entry.path}", settings_text(request, work)
        recipe, allowed = request.recipe, request.allow_change
        changes = work.world.on_main(lambda: check_changes(made_with, now, recipe, allowed, where))
    restore(work, state, request.recipe.name, found.content)
    words = [*words_of(changes), *(f"recipe: {name}" for name in request.recipe_changes)]
    return Resumed(checkpoint=found.entry.path, problems=found.problems, changes=words)


def load_newest(path: Path, world: World) -> Found | None:
    """Return a run's newest whole checkpoint on every rank.

    Files that a killed process wrote and did not announce are deleted.
    """
    # Rank 0 chooses, so that all ranks take the same file; each then reads it for itself.
    content: dict[str, Any] = {}

    def newest() -> tuple[Entry, list[str]] | None:
        found = newest_whole(path)
        if found is None:
            return None
        content.update(found.content)
        return found.entry, found.problems

    chosen = world.on_main(newest)
    if chosen is None:
        return None
    entry, problems = chosen
    saved = world.on_every(lambda: content or checkpoints.load(path / "checkpoints", entry))
    world.on_main(lambda: _remove_unannounced(path))
    return Found(entry, saved, problems)


def _remove_unannounced(path: Path) -> None:
    records = list(read_records(path, superseded=True))
    announced = [Path(r["path"]).name for r in records if r["event"] == "checkpoint"]
    since = min((r["time"] for r in records if r["event"] == "start"), default=math.inf)
    remove_unannounced(path / "checkpoints", announced, since)


def newest_whole(path: Path) -> Found | None:
    """Return a run's newest whole checkpoint, on one rank; leave the directory as it is."""
    found = checkpoints.load_newest(path / "checkpoints")
    if found is not None:
        return Found(*found)
    if any(r["event"] == "checkpoint" for r in read_records(path)):
        raise UserError(
            f"{path / 'checkpoints' / 'index.json'} names no checkpoint, though the run announced "
            "some.",
            remedy="Restore it from a backup, or start a new run.",
        )
    return None
