"""One execution of a run: build what the loop needs, pass its records on, write the result.

This is where settings, recipe and world meet. What is shown on the screen is the caller's.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from samestep.data.memory_source import MemorySource
from samestep.data.stream_source import StreamSource
from samestep.errors import UserError, listed, no_exit
from samestep.ranks.process import JOB_RUN
from samestep.ranks.world import World, gpu_uuid
from samestep.run.directory import Run, check_free, is_run, new_run_path
from samestep.run.environment import git_commit, versions
from samestep.run.files import write_text
from samestep.run.heartbeat import Heartbeat
from samestep.run.records import RUN_FORMAT, Record
from samestep.session.build import Built, build
from samestep.session.outcome import Outcome, finish_run, leave_why
from samestep.session.promise import promise_notes, promise_record
from samestep.session.recipe_changes import FROM_PYTHON, keep_recipe, recipe_changes
from samestep.session.request import Request
from samestep.session.saving import Resumed, Write, make_saver, make_writer, resume, settings_text
from samestep.settings import free_names
from samestep.training.device import kernels_of, switched
from samestep.training.loop import RunControl, train
from samestep.training.plan import plan_notes
from samestep.training.prepare import Wrap, wrap
from samestep.training.stopping import Agreement, ReceivedSignal, SaveTimer
from samestep.training.work import State, Work, is_done

Show = Callable[[Record], None]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What takes the steps of a training that is built and stands where it is to go on."""

    wrap: Wrap
    """Puts the model on all ranks."""
    drive: Callable[["Task"], None]
    """Trains until there is a reason to stop."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What an engine is given."""

    request: Request
    work: Work
    state: State
    control: RunControl
    checkpoint: Path | None
    """What the training goes on from; it has been restored already."""
    path: Path
    """The run directory."""
    emit: Show
    write: Write
    """(file name, monitored metric, state) → its `checkpoint` record; for rank 0 alone."""


def _run_loop(task: Task) -> None:
    for record in train(task.work, task.state, task.control):
        task.emit(record)


NATIVE = Engine(wrap=wrap, drive=_run_loop)


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

    Args:
        request: the recipe, its options, the settings, and whether to resume.
        world: this rank among the others, joined.
        received: the stop signal of this process, as it comes in.
        show: called on rank 0 with each record.
        begin: called on every rank with the run directory once it is there.
        started_at: when the user's command began, in seconds since the epoch.
        engine: what takes the steps.

    Raises:
        UserError: on every rank, for anything the user can mend.
    """
    with switched(request.settings, world.device):
        return _run(request, world, received, show, begin, started_at, engine)


def _run(
    request: Request,
    world: World,
    received: ReceivedSignal,
    show: Show,
    begin: Callable[[Path], None],
    started_at: float,
    engine: Engine,
) -> Outcome:
    named = world.on_main(lambda: choose_path(request))
    path = named.absolute()  # a recipe may change the working directory
    request = completed(request, world)
    built = build(request, world, engine.wrap)
    work, state = built.work, built.state
    run, begun = open_directory(path, world, begin), False
    try:
        resumed = resume(request, work, state, path)
        write = make_writer(work, state, path, settings_text(request, work))
        emit = _emitter(run, show)
        gpus = world.gather(gpu_uuid(world.device))
        if run is not None:
            describe(run, request, built, gpus)
        begun = True
        _announce(emit, request, built, path, named, resumed)
        timed = _Timed(emit, started_at)
        task = Task(
            request=request,
            work=work,
            state=state,
            control=_control(request, work, state, received, write),
            checkpoint=path / "checkpoints" / resumed.checkpoint if resumed else None,
            path=path,
            emit=timed,
            write=write,
        )
        with no_exit():
            engine.drive(task)
            first_step_s, agreement = timed.first_step_s, task.control.agreement
            return finish_run(request, built, path, run, emit, first_step_s, agreement)
    except Exception as error:
        if run is not None and begun:  # what was refused leaves the run as it was
            leave_why(run, request, work, state, error)
        raise
    finally:
        work.close()
        if run is not None:
            run.close()


def completed(request: Request, world: World) -> Request:
    """Return the request with what only the data can tell in its options."""
    if request.recipe.complete is None:
        return request
    options = world.on_main(lambda: request.recipe.complete_options(request.options))
    return replace(request, recipe=request.recipe.with_options(options), options=options)


def choose_path(request: Request) -> Path:
    """Return the directory of a run that is to begin or to go on.

    Raises:
        UserError: it holds another run.
    """
    wanted = request.settings.run_dir
    path = Path(wanted) if wanted else new_run_path(request.recipe.name)
    if request.folder != Path.cwd():
        path = request.folder / path
    if not request.resume and is_run(path):
        raise UserError(
            f"{path} already holds a run. Continue it with {_go_on(request, path)}, or choose "
            "another --run-dir."
        )
    return path if is_run(path) else check_free(path)


def _go_on(request: Request, path: Path) -> str:
    if request.source.startswith(FROM_PYTHON):
        return f"samestep.train({str(path)!r}, recipe=…, resume=True)"
    return f"`samestep train {path} --resume`"


def open_directory(path: Path, world: World, begin: Callable[[Path], None]) -> Run | None:
    """Open the run on rank 0; tell every rank of its directory once it is there.

    Raises:
        UserError: on every rank, where any of them cannot use it.
    """
    run: Run | None = None

    def open_run() -> None:
        nonlocal run
        run = Run(path)

    def tell() -> None:
        try:
            begin(path)
        except OSError as error:
            raise UserError(
                f"{path} cannot be used here: {error.strerror}. Choose a run directory on a file "
                "system that all nodes share."
            ) from error

    world.on_main(open_run)
    world.on_every(tell)
    return run


def _control(
    request: Request, work: Work, state: State, received: ReceivedSignal, write: Write
) -> RunControl:
    every = request.settings.checkpoint_every_minutes
    minutes = SaveTimer(every)
    return RunControl(
        agreement=Agreement(work.world, received, minutes.passed if every else None),
        minutes=minutes,
        save=make_saver(request, work, state, write),
    )


def _emitter(run: Run | None, show: Show) -> Show:
    heart = Heartbeat(run.path) if run is not None and os.environ.get(JOB_RUN) else None

    def emit(record: Record) -> None:
        if run is None:
            return
        if heart is not None and record["event"] in ("progress", "step"):
            heart.beat()
        if record["event"] != "progress":
            run.append(record)
        show(record)

    return emit


def describe(run: Run, request: Request, built: Built, gpus: Sequence[str] = ()) -> None:
    """Write the settings, a copy of the recipe's file, and the environment into a run.

    `gpus` are the UUIDs of the ranks' GPUs, empty for other devices.
    """
    world = built.work.world
    write_text(run.path / "settings.toml", settings_text(request, built.work))
    changed = bool(request.recipe_changes)
    keep_recipe(run.path, request.source, request.recipe, request.pieces, changed=changed)
    is_file = request.source.endswith(".py")
    commit = git_commit(Path(request.source).resolve().parent if is_file else Path.cwd())
    run.write_environment(
        {
            "versions": versions(),
            "world_size": world.world_size,
            "num_nodes": world.num_nodes,
            "launcher": world.launcher,
            "device": str(world.device),
            "backend": world.backend,
            "gpus": [gpu for gpu in dict.fromkeys(gpus) if gpu],
            **kernels_of(world.device),
            "threads": built.threads,
            **({"git_commit": commit} if commit else {}),
        }
    )


def _announce(
    emit: Show, request: Request, built: Built, path: Path, named: Path, resumed: Resumed | None
) -> None:
    """Emit the `start` record, and `resume` where the run goes on."""
    emit({**_start_record(request, built, path, resumed), "run_dir": str(named)})
    if resumed is not None:
        emit(
            {
                "event": "resume",
                "step": built.state.position.step,
                "checkpoint": resumed.checkpoint,
                "world_size": built.work.world.world_size,
                "problems": resumed.problems,
                **({"changes": resumed.changes} if resumed.changes else {}),
            }
        )


def _start_record(request: Request, built: Built, path: Path, resumed: object) -> Record:
    work, splits = built.work, built.splits
    world = work.world
    notes = notes_of(request, built, path, resumed=resumed is not None)
    per_rank = request.settings.batch_size_per_rank
    return {
        "event": "start",
        "format": RUN_FORMAT,
        "time": time.time(),
        "recipe": request.recipe.name,
        **work.plan.record(),
        **({"batch_size_per_rank": per_rank} if per_rank else {}),
        "device": str(world.device),
        "backend": world.backend,
        "launcher": world.launcher,
        "num_nodes": world.num_nodes,
        "lr_scaling": work.settings.lr_scaling,
        "base_lr": work.settings.lr,
        "precision": work.settings.precision,
        **({"param_dtype": held} if (held := work.settings.param_dtype) else {}),
        **kernels_of(world.device),
        "threads": built.threads,
        "parameters": sum(p.numel() for p in work.learner.model.parameters()),
        "lower_is_better": list(request.recipe.falling()),
        "monitor": built.state.watch.metric,
        "free_options": sorted(free_names(request.recipe.options)),
        **({"own_schedule": True} if request.recipe.schedule else {}),
        "resumed": resumed is not None,
        **promise_record(work),
        "notes": [*world.notes, *splits.notes, *notes],
        **({"left_out": list(splits.left_out)} if splits.left_out else {}),
    }


def notes_of(request: Request, built: Built, path: Path, *, resumed: bool) -> list[str]:
    """Say which settings have no effect here, and where there is nothing left to do."""
    notes = []
    work, settings, plan = built.work, built.work.settings, built.work.plan
    if request.settings_of is not None:
        notes.append(
            f"This is a new run with the settings of {request.settings_of}. To go on with that "
            f"run: samestep train {request.settings_of} --resume."
        )
    notes += _without_effect(work)
    notes += promise_notes(work, path) if resumed else []
    notes += plan_notes(plan, settings)
    if settings.keep_top_k and work.validation is None:
        notes.append("--keep-top-k keeps the last checkpoint alone: there is no validation data.")
    watched = built.state.watch.metric
    rises = getattr(request.recipe.metrics.get(watched), "higher_is_better", watched == "accuracy")
    directed = rises or watched in request.recipe.falling()
    if settings.monitor and settings.mode == "auto" and not directed:
        notes.append(
            f"--monitor {watched}: the highest {watched} counts as the best. If less is better, "
            f'write lower_is_better=("{watched}",) into the recipe, or add --mode min.'
        )
    if request.recipe_changes:
        told = listed(request.recipe_changes, 5)
        notes.append(f"The run goes on with the recipe as it is now; what has changed: {told}.")
    elif resumed and (changes := recipe_changes(path, request.source)):
        told = listed(changes, 5)
        notes.append(f"{request.source} has changed ({told}); the run goes on with its own copy.")
    if resumed and is_done(work, built.state):
        notes.append("The run is finished; --epochs or --max-steps with a larger number goes on.")
    return notes


def _without_effect(work: Work) -> list[str]:
    """Say what has no effect here, and what takes a slower way."""
    settings, world = work.settings, work.world
    notes = []
    if settings.num_workers and isinstance(work.train, MemorySource):
        notes.append("--num-workers has no effect: the data is held in memory.")
    if isinstance(work.train, MemorySource) and not work.train.is_resident:
        notes.append(
            "The training data stays in the CPU's memory, since it would take more than a quarter "
            "of the GPU's. Its batches are copied while the GPU computes."
        )
    if settings.shuffle_buffer and not isinstance(work.train, StreamSource):
        notes.append(
            "--shuffle-buffer has no effect: the data is no stream, and is shuffled whole."
        )
    if isinstance(work.train, StreamSource) and work.train.loses_its_place:
        notes.append(
            "The stream's state_dict does not lead back to the same element, or cannot be saved: a "
            "run that goes on will read the elements before again, and skip them."
        )
    ways = (settings.checkpoint_every_steps, settings.checkpoint_every_minutes)
    if work.plan.is_stream and not work.plan.epochs and ways == (None, None):
        notes.append(
            "With --max-steps alone, a stream that does not end is saved and evaluated after the "
            "last step only. --checkpoint-every-steps and --eval-every-steps do it before."
        )
    if settings.sync_batchnorm and world.world_size == 1:
        notes.append("--sync-batchnorm has no effect on one rank: it sees the whole batch.")
    if settings.bucket_cap_mb is not None and world.world_size == 1 and not world.connected:
        notes.append("--bucket-cap-mb has no effect on one rank: it reduces nothing.")
    if settings.cudnn_benchmark and world.device.type != "cuda":
        notes.append("--cudnn-benchmark has no effect: cuDNN serves NVIDIA GPUs alone.")
    return notes


class _Timed:
    """Pass records on, and keep the seconds from the user's command to the first of them."""

    def __init__(self, emit: Show, started_at: float) -> None:
        self._emit, self._started_at = emit, started_at
        self.first_step_s: float | None = None

    def __call__(self, record: Record) -> None:
        if self.first_step_s is None:
            self.first_step_s = time.time() - self._started_at
        self._emit(record)
