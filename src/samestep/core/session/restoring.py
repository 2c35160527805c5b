"""Find a checkpoint that is whole, on all ranks, and continue a training from it."""

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from samestep.base.errors import UserError
from samestep.base.run import checkpoints
from samestep.base.run.directory import is_run
from samestep.base.run.files import write_text
from samestep.base.run.index import Entry, Index, index_text, read_index, remove_unannounced, verify
from samestep.base.run.records import read_records
from samestep.core.session.request import Request, changes_since, to_toml
from samestep.core.training.snapshot import kept_parts, restore
from samestep.core.training.work import State, Work
from samestep.launch.ranks.mesh import mesh_of
from samestep.launch.ranks.world import World


class Loaded(NamedTuple):
    """A checkpoint that a run continues from."""

    entry: Entry
    content: dict[str, Any]
    problems: list[str]
    """What was wrong with newer ones."""
    changes: Sequence[str] = ()
    """What --allow-change has let differ from what it was made with."""


def go_on(request: Request, work: Work, state: State, path: Path, world: World) -> Loaded | None:
    """Restore a training from a run's newest checkpoint, if it has one, and return its entry.

    All ranks of `world` call it. What would make it another training is refused.
    """
    mesh = mesh_of(work.learner.model)
    loaded = load_newest(path, world, mesh, own=kept_parts(work))
    if loaded is None:
        return None
    made_with, now = loaded.content["made_with"], to_toml(request, work.plan)
    where = f"{path / 'checkpoints' / loaded.entry.path}"
    changes = work.world.on_main(lambda: changes_since(made_with, now, request, where))
    restore(work, state, request.recipe.name, loaded.content)
    return loaded._replace(
        content={}, changes=[*changes, *(f"recipe: {c}" for c in request.recipe_changes)]
    )


def load_newest(
    path: Path, world: World, mesh: Any = None, own: tuple[str, ...] = ()
) -> Loaded | None:
    """Return a run's newest whole checkpoint on every rank, by `load_first`.

    Raises:
        UserError: none is whole, or neither index nor records lead to one.
    """
    folder = path / "checkpoints"
    problems = list[str]()

    def newest_first() -> list[Entry]:
        index = _index_of(path, problems)
        return sorted(index.checkpoints, key=lambda entry: -entry.step)

    loaded = load_first(world, folder, newest_first, problems, mesh, own)
    if problems and loaded is None:
        raise UserError("No checkpoint is intact. " + " ".join(problems), on_all_ranks=True)
    return loaded


def _index_of(path: Path, problems: list[str]) -> Index:
    """Return the index of a run; one that is lost or damaged is written anew from the records."""
    file = path / "checkpoints" / "index.json"
    damage: UserError | None = None
    try:
        index = read_index(file.parent)
    except UserError as error:
        index, damage = Index(), error
    if index.checkpoints or not any(r["event"] == "checkpoint" for r in read_records(path)):
        if damage is not None:
            raise damage
        return index
    index = _as_recorded(path)
    if not index.checkpoints:
        raise damage or UserError(
            f"{file} names no checkpoint, though the run announced some.",
            remedy="Restore it from a backup, or start a new run.",
        )
    write_text(file, index_text(index))
    problems.append(f"{file} was missing or damaged: it was rewritten from the records.")
    return index


def _as_recorded(path: Path) -> Index:
    """Return the index of those checkpoints that records tell of and whose files are there.

    A record has the hash of the file, but not those of a sharded checkpoint's parts.
    """
    index, epoch, rated = Index(), 1, dict[int, float | None]()
    for record in read_records(path):
        epoch = record.get("epoch") or epoch
        if record["event"] == "start" and (monitor := record.get("monitor")):
            falls = monitor in (record.get("lower_is_better") or ())
            index = replace(index, monitor=monitor, mode="min" if falls else "max")
        elif record["event"] == "evaluation" and record.get("split") == "validation":
            rated[record["step"]] = record.get(index.monitor)
        elif record["event"] == "checkpoint":
            step, file = record["step"], path / "checkpoints" / Path(record["path"]).name
            if file.is_file() and not file.with_suffix(".shards").exists():
                where = {"path": file.name, "step": step, "epoch": epoch}
                known = {"sha256": record["sha256"], "metric": rated.get(step)}
                index = index.add(Entry(**where, **known, time=file.stat().st_mtime))
    return index


def remove_unfinished(path: Path) -> None:
    """Delete checkpoint files that a killed process wrote and did not announce."""
    records = list(read_records(path, superseded=True))
    announced = [Path(r["path"]).name for r in records if r["event"] == "checkpoint"]
    since = min((r["time"] for r in records if r["event"] == "start"), default=math.inf)
    remove_unannounced(path / "checkpoints", announced, since)


def load_first(
    world: World,
    folder: Path,
    candidates: Callable[[], Iterable[Entry]],
    problems: list[str],
    mesh: Any = None,
    own: tuple[str, ...] = (),
) -> Loaded | None:
    """Return on every rank the first of some checkpoints that is whole; None if none is.

    Rank 0 calls `candidates` and checks the hash. Meanwhile all ranks read the file and copy what
    is `own`, as `checkpoints.load` says. If the file is damaged, the copies are dropped, and
    `problems` gets a message.

    Raises:
        UserError: a rank cannot read a file that rank 0 has found whole, or a later version of
            samestep wrote it.
    """
    for entry in world.on_main(lambda: [*candidates()]):
        with ThreadPoolExecutor(2) as both:
            checked = both.submit(verify, folder, entry) if world.is_main else None
            read = both.submit(checkpoints.load, folder, entry, verified=True, mesh=mesh, own=own)
        try:
            world.on_main(partial(_raise_damage, checked, read))
        except UserError as error:
            problems.append(str(error))
            del read  # its copies, before those of the next one are made
        else:
            return Loaded(entry, world.on_every(read.result), problems)
    return None


def _raise_damage(*ended: Future[Any] | None) -> None:
    """Raise what is wrong with a file, unless a later version wrote it.

    That one would be lost to this version's next checkpoint if it were passed over: to read it
    raises, on every rank.
    """
    for future in ended:
        error = None if future is None else future.exception()
        if error is not None and not isinstance(error, checkpoints.NewerFormat):
            raise error


def as_built(request: Request, path: Path, world: World) -> Request:
    """Return the request that is built: a run with a checkpoint starts from no other weights."""
    settings = request.settings
    if settings.init_from is None or not request.resume:
        return request
    entries = world.on_main(lambda: is_run(path) and read_index(path / "checkpoints").checkpoints)
    return replace(request, settings=replace(settings, init_from=None)) if entries else request
