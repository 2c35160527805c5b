"""Go on with a run from its newest whole checkpoint."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from samestep.errors import UserError
from samestep.ranks.world import World
from samestep.run import checkpoints
from samestep.run.index import Entry, remove_unannounced
from samestep.run.records import read_records
from samestep.session.request import Request, changes_since, to_toml
from samestep.training.snapshot import restore
from samestep.training.work import State, Work


class Found(NamedTuple):
    """A checkpoint that a run goes on from."""

    entry: Entry
    content: dict[str, Any]
    problems: list[str]
    """What was wrong with newer ones."""
    changes: Sequence[str] = ()
    """What --allow-change has let differ from what it was made with."""


def go_on(request: Request, work: Work, state: State, path: Path, found: Found) -> Found:
    """Restore a training from a checkpoint of a run; refuse what would make it another training."""
    made_with, changes = found.content.get("made_with"), list[str]()
    if made_with:  # checkpoints of earlier versions do not say
        where, now = f"{path / 'checkpoints' / found.entry.path}", to_toml(request, work.plan)
        changes = work.world.on_main(lambda: changes_since(made_with, now, request, where))
    restore(work, state, request.recipe.name, found.content)
    return found._replace(changes=[*changes, *(f"recipe: {c}" for c in request.recipe_changes)])


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

    def clean() -> None:
        records = list(read_records(path, superseded=True))
        announced = [Path(r["path"]).name for r in records if r["event"] == "checkpoint"]
        since = min((r["time"] for r in records if r["event"] == "start"), default=math.inf)
        remove_unannounced(path / "checkpoints", announced, since)

    chosen = world.on_main(newest)
    if chosen is None:
        return None
    entry, problems = chosen
    saved = world.on_every(lambda: content or checkpoints.load(path / "checkpoints", entry))
    world.on_main(clean)
    return Found(entry, saved, problems)


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
