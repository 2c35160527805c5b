"""One run on this rank, from open to end: its directory, records, checkpoints and result.

`samestep train` with either engine and `samestep.open_run` write their runs through it.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from samestep.base.errors import AlreadyTold, UserError
from samestep.base.run.directory import Heartbeat, Run, is_run, versions
from samestep.base.run.records import RUN_FORMAT, Record, RecordFile
from samestep.base.startup import JOB_RUN, PARENT
from samestep.base.trees import tree_leaves
from samestep.base.words import count, size
from samestep.core.learner.device import peak_memory_bytes
from samestep.core.learner.optimizer_state import members_of
from samestep.core.learner.side_effects import differs_by_ranks
from samestep.core.recipe import Splits
from samestep.core.session.request import Request
from samestep.core.session.saver import Saver
from samestep.core.training.snapshot import weights_sha256
from samestep.core.training.stopping import Watch
from samestep.core.training.work import Position, State, Work
from samestep.launch.ranks import watched
from samestep.launch.ranks.process import is_lost_peer, why_failed
from samestep.launch.ranks.world import World

Sink = Callable[[Record], str | None]
"""Takes each record of a run on rank 0; returns, once, why it can take nothing more."""
_FEW = 4
"""With room for fewer checkpoints a run says so when it starts."""
_COPIES = {"Adagrad": 1, "Adafactor": 0, "Lion": 1, "Muon": 1, "Rprop": 2}
"""How many numbers some optimizers keep for each weight, once they have taken a step."""
_USUAL_COPIES = 2


@dataclass(frozen=True, kw_only=True)
class Holding:
    """What a rank brings into the next group."""

    splits: Splits | None = None
    """The data, loaded already."""
    asked: tuple[dict[str, Any], dict[str, Any]] | None = None
    """Settings and options that began the run. A newcomer reads the run's, with more filled in."""
    content: Mapping[str, Any] | None = None
    """Its training, as a checkpoint has it; None if it has none, or a checkpoint is to be read."""
    parts: tuple[int, ...] = ()
    """The virtual ranks that it held."""
    due_again: bool = False
    """Whether what fell due after its newest step was not done to its end."""
    was_main: bool = False
    """Whether it was rank 0."""
    recent: Mapping[str, Record] = field(default_factory=dict)
    """The newest record of each kind: rank 0 may have died before it wrote it."""

    @property
    def progress(self) -> tuple[int, ...]:
        """How far the training is, to compare with that of other ranks; () for none."""
        if self.content is None:
            return ()
        at = self.content["position"]
        return at["step"], at["epoch"], int(not self.due_again)


class Session:
    """An open run. Every rank has one; only rank 0 writes."""

    def __init__(
        self, path: Path, world: World, on_open: Callable[[Path], None], sinks: Sequence[Sink] = ()
    ) -> None:
        """Open the run directory on rank 0, then call `on_open` with it on every rank.

        On rank 0, the run's files get each record, and then the other `sinks`.
        """
        self.path, self.world, self._sinks = path, world, (self._keep, *sinks)
        self.run: Run | None = None
        """The open directory; None on other ranks."""
        self.begun = False
        """Whether this process has written its `start` record."""
        self.first_record_s: float | None = None
        """The time of the first record after `start` and `resume`, in seconds since the epoch."""
        self.trained = False
        """Whether the training has come to its end: what follows are tests and pictures."""
        self.regroups: int | None = None
        """How often the ranks have found together anew; None where the first death ends a run."""
        self.recent: dict[str, Record] = {}
        """The newest record of each kind, on every rank, where ranks outlive each other."""
        self._written: set[tuple[Any, ...]] = set()
        """What was written of the newest step before the ranks found together anew."""
        self._early: list[Record] = []
        self.saver = Saver(path / "checkpoints", world, self.emit)
        world.on_main(self._open)
        world.on_every(lambda: _call_on_open(on_open, path))
        watched.in_run(path)
        job = os.environ.get(JOB_RUN) if world.is_main else None
        self._heartbeat = Heartbeat(Path(job).absolute()) if job else None

    def add_sink(self, sink: Sink) -> None:
        """Give another the records from now on."""
        self._sinks = (*self._sinks, sink)

    def _open(self) -> None:
        self.run = Run(self.path)

    def begin(self, start: Record, resume: Record | None, step: int, watch: Watch | None) -> None:
        """Write the `start` record and, when the run continues, the `resume` record.

        `step` is where it continues, `watch` how it will choose its best checkpoint.
        """
        self.saver.begin(step, watch)
        self.begun = True
        watched.turn_to(watched.FIRST_STEP)
        for record in (start, resume, *self._early):
            if record is not None:
                self.emit(record)

    def emit(self, record: Record) -> None:
        """Give a record to all sinks, on rank 0; records before `begin` wait for it."""
        if self.world.elastic and _key(record):
            self.recent[record["event"]] = record
        if self.run is None or _key(record) in self._written:
            return
        if not self.begun:
            self._early.append(record)
            return
        if self.saver.writing is not None:
            self.saver.emit_written()
        event = record["event"]
        if self.first_record_s is None and event not in ("start", "resume"):
            self.first_record_s = time.time()
        if event in ("progress", "step"):
            self.beat()
        for sink in self._sinks:
            if why := sink(record):
                lost = {"event": "screen", "step": record.get("step", 0)}
                self.run.append({**lost, "text": f"{why} The training continues."})

    def _keep(self, record: Record) -> None:
        if self.run is not None and record["event"] != "progress":
            self.run.append(record)

    def go_on(self, record: Record, step: int, watch: Watch, newest: Iterable[Record]) -> None:
        """Continue in another group of ranks: write the `regroup` record.

        `newest` are the records of the newest step; those already written are not written again.
        """
        self.saver.begin(step, watch)
        self.begun = True
        if self.run is not None:
            self._written = {_key(earlier) for earlier in _newest_records(self.run.path)} - {()}
        for earlier in newest:
            self.emit(earlier)
        self.emit(record)

    def beat(self) -> None:
        """Show a job of Slurm that steps are taken."""
        if self._heartbeat is not None:
            self._heartbeat.beat()

    def close(self) -> None:
        """Wait for the last checkpoint, then let another process open the run."""
        self.saver.settle()
        if self.run is not None:
            self.run.close()


def _newest_records(path: Path) -> list[Record]:
    records: list[Record] = []
    for record in RecordFile(path / "events.jsonl").read_all():
        if record["event"] in ("start", "resume"):
            records.clear()
        records.append(record)
    return records


_ONCE = ("step", "epoch", "evaluation", "baselines", "picture", "stop")


def _key(record: Record) -> tuple[Any, ...]:
    """Return the key that makes a record unique in its step; () for a kind that may come twice."""
    event = record["event"]
    if event not in _ONCE:
        return ()
    return event, record.get("step"), record.get("split"), record.get("name")


def _call_on_open(on_open: Callable[[Path], None], path: Path) -> None:
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
    modules: Iterable[nn.Module],
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
        "by_ranks": sorted({kind for module in modules for kind in differs_by_ranks(module)}),
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
    """Return the contents of environment.json; `more` are fields of the caller."""
    return {"versions": versions(), **_ranks(world), **more}


def _ranks(world: World) -> dict[str, Any]:
    names = ("world_size", "num_nodes", "launcher", "backend")
    ranks = {name: getattr(world, name) for name in names}
    return {**ranks, "device": str(world.device), "threads": torch.get_num_threads()}


def run_result(
    world: World, position: Position, *, recipe: str, status: str, reason: str, **more: Any
) -> dict[str, Any]:
    """Return the contents of result.json; `more` are fields of the caller."""
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


def training_result(
    request: Request,
    work: Work,
    state: State,
    status: str,
    weights: str,
    test: dict[str, Any] | None = None,
    first_step_s: float | None = None,
) -> dict[str, Any]:
    """Return the contents of result.json for the training of a recipe."""
    watch = state.watch
    best = {"metric": watch.metric, "mode": watch.mode, "value": watch.best}
    return run_result(
        work.world,
        state.position,
        recipe=request.recipe.name,
        status=status,
        reason=state.stop_reason,
        global_batch_size=work.plan.global_batch_size,
        weights_sha256=weights,
        test=test,
        best={**best, "epoch": watch.best_epoch},
        seconds_to_first_step=first_step_s,
        peak_memory_bytes=peak_memory_bytes(work.world.device),
    )


def record_failure(
    session: Session, request: Request, work: Work, state: State, error: Exception
) -> None:
    """Write down why the run failed, as far as the disk allows; a refused run stays as it was."""
    if session.run is None or not session.begun:
        return
    state.stop_reason = f"failed: {why_failed(error)}"
    with contextlib.suppress(Exception):  # a rank that writes its part may be gone
        session.saver.settle()
    # Of a rank that only lost another, who has started the ranks records why: see `ranks.start`.
    is_effect = PARENT in os.environ and is_lost_peer(error)
    with contextlib.suppress(UserError):  # first: the weights may wait for a device that hangs
        step = state.position.step
        if not is_effect:
            session.run.append({"event": "stop", "step": step, "reason": state.stop_reason})
    weights = ""
    with contextlib.suppress(Exception):  # a model that cannot give its weights
        if not work.learner.sharded:  # the other ranks may be gone
            weights = weights_sha256(work.learner.model)
    with contextlib.suppress(UserError):
        session.run.write_result(training_result(request, work, state, "failed", weights))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a training ended."""

    path: Path
    signum: int
    """The signal that stopped it, or 0."""


class Stopped(AlreadyTold):
    """All ranks have agreed to stop on a signal, and have saved."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum


def state_bytes(
    modules: Iterable[nn.Module],
    optimizers: Iterable[torch.optim.Optimizer],
    more: Iterable[Tensor] = (),
) -> int:
    """Return about how many bytes a checkpoint of these takes, also before the first step.

    An optimizer that has no state yet counts as its class will have it: two numbers per weight
    unless known otherwise.
    """
    total = sum(map(_bytes, {id(value): value for value in more}.values()))
    for module in modules:
        values = {id(value): value for value in module.state_dict(keep_vars=True).values()}
        total += sum(_bytes(value) for value in values.values() if isinstance(value, Tensor))
    for optimizer in (value for listed in optimizers for value in members_of(listed)):
        held = [leaf for state in optimizer.state.values() for leaf in tree_leaves(state)]
        total += sum(_bytes(leaf) for leaf in held if isinstance(leaf, Tensor))
        for group in optimizer.param_groups:
            new = [p for p in group["params"] if p.requires_grad and p not in optimizer.state]
            total += _copies(optimizer, group) * sum(map(_bytes, new))
    return total


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()  # of a sharded one, all parts


def _copies(optimizer: torch.optim.Optimizer, group: dict[str, object]) -> int:
    if isinstance(optimizer, torch.optim.SGD):
        return int(bool(group["momentum"]))
    if isinstance(optimizer, torch.optim.RMSprop):
        return 1 + bool(group["momentum"]) + bool(group["centered"])
    return _COPIES.get(type(optimizer).__name__, _USUAL_COPIES) + bool(group.get("amsgrad"))


def room_notes(folder: Path, checkpoint_bytes: int) -> list[str]:
    """Return a note if few checkpoints of this size fit on the disk of a folder."""
    existing = next((place for place in (folder, *folder.parents) if place.is_dir()), None)
    if existing is None or checkpoint_bytes <= 0:
        return []
    free = shutil.disk_usage(existing).free
    fitting = free // checkpoint_bytes
    if fitting >= _FEW:
        return []
    room = f"room for about {count(fitting, 'checkpoint')}" if fitting else "no room for one"
    sizes = f"A checkpoint takes about {size(checkpoint_bytes)}; {size(free)} are free"
    advice = "Free some space, choose another run directory, or keep fewer checkpoints."
    return [f"{sizes} in {existing}: {room}. {advice}"]
