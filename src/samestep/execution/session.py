"""One execution of a run: build what the loop needs, pass its records on, write the result.

This is where settings, recipe and world meet. What is shown on the screen is the caller's.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from samestep.data.batches import Source, open_source
from samestep.data.blocks import Lap, untimed
from samestep.data.loading import load_splits
from samestep.data.memory import MemorySource
from samestep.errors import UserError
from samestep.execution.outcome import Outcome, finish_run, leave_why
from samestep.execution.request import RECIPE_COPY, Request, to_toml
from samestep.execution.saving import Write, make_saver, make_writer, resume
from samestep.machine import usable_cores
from samestep.ranks.world import World
from samestep.recipe import Splits
from samestep.run.directory import Run, is_run, new_run_path
from samestep.run.environment import versions
from samestep.run.files import write_text
from samestep.run.records import RUN_FORMAT, Record
from samestep.settings import Settings
from samestep.training.compiled import make_step, what_compiles
from samestep.training.loop import Job, train
from samestep.training.memory import keep_freed_memory
from samestep.training.optimizer import make_optimizer
from samestep.training.parallel import wrap
from samestep.training.phases import make_phases
from samestep.training.plan import make_plan
from samestep.training.precision import check_precision, data_dtype, make_scaler
from samestep.training.prepare import prepare
from samestep.training.state import seed_alike, seed_rank
from samestep.training.step import Trainee
from samestep.training.stopping import Agreement, Received, Watch
from samestep.training.threads import choose_threads

Show = Callable[[Record], None]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What takes the steps of a job that is built and stands where it is to go on."""

    wrap: Callable[[nn.Module, World], nn.Module]
    """Puts the model on all ranks."""
    drive: Callable[["Task"], None]
    """Trains until there is a reason to stop."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What an engine is given."""

    request: Request
    job: Job
    checkpoint: Path | None
    """What the job goes on from; it has been restored already."""
    path: Path
    """The run directory."""
    emit: Show
    write: Write
    """(file name, monitored metric, state) → its `checkpoint` record; for rank 0 alone."""


def _run_loop(task: Task) -> None:
    for record in train(task.job):
        task.emit(record)


NATIVE = Engine(wrap=wrap, drive=_run_loop)


def run_session(
    request: Request,
    world: World,
    *,
    received: Received,
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
    path = world.on_main(lambda: choose_path(request))
    if request.recipe.complete is not None:
        options = world.on_main(lambda: request.recipe.complete_options(request.options))
        request = replace(request, options=options)
    job, splits, threads = build_job(request, world, received, engine)
    run = _open(path, world)
    world.on_every(lambda: _begin(begin, path))
    begun = False
    try:
        resumed = resume(request, job, path, world)
        write = make_writer(job, path, world)
        job.save = make_saver(request, world, write)
        emit = _emitter(run, show)
        if run is not None:
            describe(run, request, job, threads)
        begun = True
        emit(_start_record(request, job, splits, path, threads, resumed))
        if resumed is not None:
            emit(
                {
                    "event": "resume",
                    "step": job.position.step,
                    "checkpoint": resumed[0],
                    "world_size": world.world_size,
                    "problems": resumed[1],
                }
            )
        timed = _Timed(emit, started_at)
        newest = path / "checkpoints" / resumed[0] if resumed is not None else None
        engine.drive(
            Task(request=request, job=job, checkpoint=newest, path=path, emit=timed, write=write)
        )
        return finish_run(request, job, splits, path, run, emit, timed.first_step_s)
    except Exception as error:
        if run is not None and begun:  # what was refused leaves the run as it was
            job.stop_reason = f"failed: {error}"
            leave_why(run, request, job)
        raise
    finally:
        for source in (job.train, job.validation):
            if source is not None:
                source.close()
        if run is not None:
            run.close()


def choose_path(request: Request) -> Path:
    """Return the directory of a run that is to begin or to go on.

    Raises:
        UserError: it holds another run.
    """
    wanted = request.settings.run_dir
    path = Path(wanted) if wanted else new_run_path(request.recipe.name)
    if not request.resume and is_run(path):
        raise UserError(
            f"{path} already holds a run. Continue it with: samestep train {path} --resume; "
            "or choose another --run-dir."
        )
    return path


def build_job(
    request: Request, world: World, received: Received, engine: Engine
) -> tuple[Job, Splits, int]:
    """Build model, data and optimizer; nothing is written yet, so a mistake leaves no trace."""
    settings, recipe = request.settings, request.recipe
    check_precision(settings.precision, world.device)
    dtype = data_dtype(settings.precision)
    seed_alike(settings.seed)
    splits = load_splits(recipe, request.options, world)

    phases = make_phases(world.device)

    def source(data: Any, lap: Lap = untimed) -> Source:
        return open_source(
            data,
            recipe,
            world,
            seed=settings.seed,
            dtype=dtype,
            num_workers=settings.num_workers,
            lap=lap,
        )

    # Looked up anew each time: a profile puts marks into its trace there.
    train_source = source(splits.train, lambda phase: phases.lap(phase))  # noqa: PLW0108
    num_samples = _agree_on_size(train_source, world)
    plan = world.on_every(
        lambda: make_plan(settings, num_samples, world.world_size, resumed=request.resume)
    )
    seed_alike(settings.seed)
    model = world.on_every(
        lambda: prepare(recipe.build_model(request.options), settings, world, dtype)
    )
    seed_rank(settings.seed, world.rank)
    threads = _share_cores(settings, model, world)
    keep_freed_memory(world.device)
    compiles = what_compiles(settings, world, model)
    # Inside of what connects the ranks: DDP's own code breaks a graph that begins outside of it.
    forward: nn.Module = model
    if compiles == "model":
        forward = cast("nn.Module", torch.compile(model, dynamic=False))
    optimizer = make_optimizer(model.parameters(), settings, plan.lr, world.device)
    trainee = Trainee(
        model=model,
        wrapped=engine.wrap(forward, world),
        optimizer=optimizer,
        scaler=make_scaler(settings.precision, world.device),
        loss=recipe.loss,
    )
    per_block = train_source.steps_per_block(plan.global_batch_size)
    job = Job(
        settings=settings,
        plan=plan,
        world=world,
        trainee=trainee,
        step=make_step(compiles, trainee, settings, world, plan, per_block, phases),
        train=train_source,
        validation=source(splits.validation) if splits.validation is not None else None,
        metrics=recipe.metrics,
        agreement=Agreement(world, received, settings.checkpoint_every_minutes),
        watch=_watch(request, splits),
        phases=phases,
        classes=splits.classes,
        save=lambda _job, _name, _metric: {},
    )
    return job, splits, threads


def _share_cores(settings: Settings, model: nn.Module, world: World) -> int:
    """Set the number of threads of this rank, among those with the same cores; return it."""
    cores = usable_cores()
    neighbours = world.gather((world.node, cores)).count((world.node, cores))
    threads = choose_threads(settings.threads, model, len(cores), neighbours)
    torch.set_num_threads(threads)
    return threads


def _agree_on_size(source: Source, world: World) -> int:
    """Return the number of training samples, once all ranks have the same."""
    sizes = world.gather(source.num_samples)
    if len(set(sizes)) > 1:
        raise UserError(
            f"The ranks loaded data of different sizes: {sizes}. Each must load all of it; "
            "samestep shares it out.",
            on_all_ranks=True,
        )
    return sizes[0]


def _watch(request: Request, splits: Splits) -> Watch:
    names = ["loss", *request.recipe.metrics]
    if splits.validation is None:
        for name in ("patience", "monitor"):
            if getattr(request.settings, name) is not None:
                raise UserError(f"--{name} needs validation data, and the recipe has none.")
    default = "accuracy" if "accuracy" in names else "loss"
    metric = request.settings.monitor or default
    if metric not in names:
        raise UserError(f"--monitor {metric}: the recipe measures {', '.join(names)}.")
    mode = request.settings.mode
    if mode == "auto":
        mode = "min" if metric == "loss" else "max"
    return Watch(metric=metric, mode=mode)


def _begin(begin: Callable[[Path], None], path: Path) -> None:
    try:
        begin(path)
    except OSError as error:
        raise UserError(
            f"{path} cannot be used here: {error.strerror}. The run directory must be on a file "
            "system that all nodes share; choose it with --run-dir."
        ) from error


def _open(path: Path, world: World) -> Run | None:
    """Open the run on rank 0, and wait on the others until its directory is there."""
    run: Run | None = None

    def open_run() -> None:
        nonlocal run
        run = Run(path)

    world.on_main(open_run)
    return run


def _emitter(run: Run | None, show: Show) -> Show:
    def emit(record: Record) -> None:
        if run is None:
            return
        if record["event"] != "progress":
            run.append(record)
        show(record)

    return emit


def describe(run: Run, request: Request, job: Job, threads: int) -> None:
    """Write the settings, a copy of the recipe's file, and the environment into a run."""
    world = job.world
    write_text(run.path / "settings.toml", to_toml(request, job.plan))
    kept = run.path / RECIPE_COPY
    if request.source.endswith(".py") and not kept.exists():
        write_text(kept, Path(request.source).read_text(encoding="utf-8"))
    run.write_environment(
        {
            "versions": versions(),
            "world_size": world.world_size,
            "num_nodes": world.num_nodes,
            "launcher": world.launcher,
            "device": str(world.device),
            "backend": world.backend,
            "threads": threads,
        }
    )


def _start_record(
    request: Request, job: Job, splits: Splits, path: Path, threads: int, resumed: object
) -> Record:
    world = job.world
    notes = _notes(request, job, path, resumed=resumed is not None)
    return {
        "event": "start",
        "format": RUN_FORMAT,
        "time": time.time(),
        "recipe": request.recipe.name,
        "run_dir": str(path),
        **asdict(job.plan),
        "device": str(world.device),
        "backend": world.backend,
        "launcher": world.launcher,
        "num_nodes": world.num_nodes,
        "lr_scaling": job.settings.lr_scaling,
        "base_lr": job.settings.lr,
        "precision": job.settings.precision,
        "threads": threads,
        "parameters": sum(p.numel() for p in job.trainee.model.parameters()),
        "resumed": resumed is not None,
        "notes": [*world.notes, *splits.notes, *notes],
        **({"left_out": list(splits.left_out)} if splits.left_out else {}),
    }


def _notes(request: Request, job: Job, path: Path, *, resumed: bool) -> list[str]:
    """Say which settings have no effect here, and where there is nothing left to do."""
    notes = []
    if job.settings.num_workers and isinstance(job.train, MemorySource):
        notes.append("--num-workers has no effect: the data is held in memory.")
    if job.settings.keep_top_k and job.validation is None:
        notes.append("--keep-top-k keeps the last checkpoint alone: there is no validation data.")
    if job.settings.sync_batchnorm and job.world.world_size == 1:
        notes.append("--sync-batchnorm has no effect on one rank: it sees the whole batch.")
    kept = path / RECIPE_COPY
    source = Path(request.source)
    if kept.is_file() and source.is_file() and kept.read_bytes() != source.read_bytes():
        notes.append(f"{source} has changed since the run began; {kept} is how it was.")
    if resumed and job.position.step >= job.plan.total_steps:
        notes.append("The run is finished; --epochs or --max-steps with a larger number goes on.")
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
