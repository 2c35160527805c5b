"""One training of a recipe: build what the loop needs, pass its records on, write the result.

This is where settings, recipe and world meet. The caller decides what the screen shows.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from samestep.errors import no_exit
from samestep.ranks.world import World, gpu_uuid
from samestep.run.directory import Run, check_free, is_run, new_run_path
from samestep.run.environment import git_commit
from samestep.run.files import write_text
from samestep.run.records import Record
from samestep.session.build import Built, build
from samestep.session.notes import notes_of
from samestep.session.outcome import Outcome, finish_run, record_failure
from samestep.session.recipe_changes import FROM_PYTHON, keep_recipe
from samestep.session.request import Request
from samestep.session.resuming import Resumed, resume, settings_text
from samestep.session.session import (
    Session,
    Show,
    environment,
    refuse_taken,
    resume_record,
    start_record,
)
from samestep.settings import free_names
from samestep.training.alike import arithmetic
from samestep.training.device import kernels_of, switched
from samestep.training.loop import RunControl, train
from samestep.training.prepare import Wrap, wrap
from samestep.training.snapshot import capture
from samestep.training.stopping import Agreement, ReceivedSignal, SaveTimer
from samestep.training.work import State, Work

Write = Callable[[dict[str, Any], float | None], Record]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A training that is built and restored, ready for an engine."""

    request: Request
    work: Work
    state: State
    control: RunControl
    checkpoint: Path | None
    """The checkpoint that it was restored from."""
    session: Session
    write: Write
    """(content, monitored metric) → the `checkpoint` record, once it is announced; rank 0 only."""

    def emit(self, record: Record) -> None:
        """Write a record and show it, on rank 0."""
        self.session.emit(record)


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What takes the steps of a training."""

    wrap: Wrap
    """Puts the model on all ranks."""
    drive: Callable[[Task], None]
    """Trains until there is a reason to stop."""


def _drive(task: Task) -> None:
    for record in train(task.work, task.state, task.control):
        task.emit(record)


NATIVE = Engine(wrap=wrap, drive=_drive)


def run_session(
    request: Request,
    world: World,
    *,
    received: ReceivedSignal,
    show: Show,
    begin: Callable[[Path], None],
    started_at: float,
    engine: Engine = NATIVE,
) -> Outcome:
    """Train a recipe on this world, from the beginning or from the newest checkpoint.

    `show` gets each record on rank 0; `begin` gets the run directory on every rank once it is
    there. The user's command began at `started_at`, in seconds since the epoch.
    """
    with switched(request.settings, world.device):
        named = world.on_main(lambda: choose_path(request))
        path = named.absolute()  # the recipe's functions may change the working directory
        request = completed(request, world)
        built = build(request, world, engine.wrap)
        session = Session(path, world, begin, show)
        try:
            return _train(request, built, session, named, received, started_at, engine)
        except Exception as error:
            record_failure(session, request, built.work, built.state, error)
            raise
        finally:
            built.work.close()
            session.close()


def _train(
    request: Request,
    built: Built,
    session: Session,
    named: Path,
    received: ReceivedSignal,
    started_at: float,
    engine: Engine,
) -> Outcome:
    work, state, world = built.work, built.state, built.work.world
    resumed = resume(request, work, state, session.path)
    gpus = world.gather(gpu_uuid(world.device))
    start = _start_record(request, built, session.path, named, resumed)
    if session.run is not None:
        describe(session.run, request, built, gpus)
    resume_line = None
    if resumed is not None:
        step, checkpoint = state.position.step, resumed.checkpoint
        resume_line = resume_record(world, step, checkpoint, resumed.problems)
        if resumed.changes:
            resume_line["changes"] = resumed.changes
    session.begin(start, resume_line, state.position.step, state.watch)
    every = request.settings.checkpoint_every_minutes
    minutes = SaveTimer(every)
    agreement = Agreement(world, received, minutes.passed if every else None)
    made_with = settings_text(request, work)

    def write(content: dict[str, Any], metric: float | None) -> Record:
        content = {**content, "made_with": made_with}
        keep, watch = work.settings.keep_top_k, state.watch
        return session.save(content, state.position, metric=metric, watch=watch, keep_top_k=keep)

    def save(metric: float | None) -> Record:
        started = time.perf_counter()
        content = capture(work, state, request.recipe.name)
        record = world.on_main(lambda: write(content, metric))
        return {**record, "seconds": time.perf_counter() - started}

    task = Task(
        request=request,
        work=work,
        state=state,
        control=RunControl(agreement=agreement, minutes=minutes, save=save),
        checkpoint=session.path / "checkpoints" / resumed.checkpoint if resumed else None,
        session=session,
        write=write,
    )
    with no_exit():
        engine.drive(task)
        first = session.first_record_s
        first_step_s = None if first is None else first - started_at
        return finish_run(request, built, session, agreement, first_step_s)


def completed(request: Request, world: World) -> Request:
    """Return the request with its options completed by what only the data can tell."""
    if request.recipe.complete is None:
        return request
    options = world.on_main(lambda: request.recipe.complete_options(request.options))
    return replace(request, recipe=request.recipe.with_options(options), options=options)


def choose_path(request: Request) -> Path:
    """Return the directory of a run that is to begin or to go on."""
    wanted = request.settings.run_dir
    path = Path(wanted) if wanted else new_run_path(request.recipe.name)
    if request.folder != Path.cwd():
        path = request.folder / path
    if not request.resume:
        in_python = request.source.startswith(FROM_PYTHON)
        call = f"samestep.train({str(path)!r}, recipe=…, resume=True)"
        refuse_taken(path, call if in_python else f"`samestep train {path} --resume`")
    return path if is_run(path) else check_free(path)


def describe(run: Run, request: Request, built: Built, gpus: Sequence[str] = ()) -> None:
    """Write settings, recipe and environment into a run; `gpus` are UUIDs, "" for other devices."""
    world = built.work.world
    write_text(run.path / "settings.toml", settings_text(request, built.work))
    changed = bool(request.recipe_changes)
    keep_recipe(run.path, request.source, request.recipe, request.pieces, changed=changed)
    is_file = request.source.endswith(".py")
    commit = git_commit(Path(request.source).resolve().parent if is_file else Path.cwd())
    run.write_environment(
        environment(
            world,
            gpus=[gpu for gpu in dict.fromkeys(gpus) if gpu],
            **kernels_of(world.device),
            **({"git_commit": commit} if commit else {}),
        )
    )


def _start_record(
    request: Request, built: Built, path: Path, named: Path, resumed: Resumed | None
) -> Record:
    work, splits, settings = built.work, built.splits, built.work.settings
    notes = notes_of(request, built, path, resumed=resumed is not None)
    only_if_set = {
        "batch_size_per_rank": request.settings.batch_size_per_rank,
        "param_dtype": settings.param_dtype,
        "own_schedule": bool(request.recipe.schedule),
        "left_out": list(splits.left_out),
        "arithmetic": arithmetic(work.world.device) if work.world.virtual_ranks else None,
    }
    return start_record(
        work.world,
        recipe=request.recipe.name,
        run_dir=named,
        parameters=work.learner.model.parameters(),
        **work.plan.record(),
        **kernels_of(work.world.device),
        lr_scaling=settings.lr_scaling,
        base_lr=settings.lr,
        precision=settings.precision,
        lower_is_better=list(request.recipe.falling()),
        monitor=built.state.watch.metric,
        free_options=sorted(free_names(request.recipe.options)),
        resumed=resumed is not None,
        **{name: value for name, value in only_if_set.items() if value},
        notes=[*splits.notes, *notes],
    )
