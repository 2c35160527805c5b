"""One execution of a run: build what the loop needs, pass its records on, write the result.

This is where settings, recipe and world meet. What is shown on the screen is the caller's.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from samestep.config import RECIPE_COPY, Request, to_toml
from samestep.data.batches import Source, open_source
from samestep.data.memory import MemorySource
from samestep.data.ready import load_splits
from samestep.errors import UserError
from samestep.files import write_text
from samestep.outcome import Outcome, finish_run, leave_why
from samestep.recipe import Splits
from samestep.run import Record, Run, is_run, new_run_path, read_records, usable_cores, versions
from samestep.training import checkpoint
from samestep.training.compiled import make_step, what_compiles
from samestep.training.loop import Job, train
from samestep.training.optimizer import make_optimizer
from samestep.training.parallel import wrap
from samestep.training.plan import make_plan
from samestep.training.precision import check_precision, data_dtype, make_scaler
from samestep.training.prepare import prepare
from samestep.training.state import capture, restore, seed_alike, seed_rank
from samestep.training.step import Trainee
from samestep.training.stopping import Agreement, Received, Watch
from samestep.training.threads import choose_threads
from samestep.world import World

Show = Callable[[Record], None]


def run_session(
    request: Request,
    world: World,
    *,
    received: Received,
    show: Show,
    begin: Callable[[Path], None],
    started_at: float,
) -> Outcome:
    """Train a recipe on this world, from the beginning or from the newest checkpoint.

    Args:
        request: the recipe, its options, the settings, and whether to resume.
        world: this rank among the others, joined.
        received: the stop signal of this process, as it comes in.
        show: called on rank 0 with each record.
        begin: called on every rank with the run directory once it is there.
        started_at: when the user's command began, in seconds since the epoch.

    Raises:
        UserError: on every rank, for anything the user can mend.
    """
    path = world.on_main(lambda: _choose_path(request))
    if request.recipe.complete is not None:
        options = world.on_main(lambda: request.recipe.complete_options(request.options))
        request = replace(request, options=options)
    job, splits, threads = _build(request, world, received)
    run = _open(path, world)
    world.on_every(lambda: _begin(begin, path))
    begun = False
    try:
        resumed = _resume(request, job, path, world)
        job.save = _saver(request, path, job.position.step, world)
        emit = _emitter(run, show)
        if run is not None:
            _describe(run, request, job, threads)
        begun = True
        emit(_start_record(request, job, splits, path, threads, resumed))
        if resumed is not None:
            emit({"event": "resume", "step": job.position.step, "checkpoint": resumed[0],
                  "world_size": world.world_size, "problems": resumed[1]})  # fmt: skip
        first_step_s = _drive(job, emit, started_at)
        return finish_run(request, job, splits, path, run, emit, first_step_s)
    except Exception as error:
        if run is not None and begun:  # what was refused leaves the run as it was
            job.stop_reason = f"failed: {error}"
            leave_why(run, request, job)
        raise
    finally:
        if run is not None:
            run.close()


def _choose_path(request: Request) -> Path:
    wanted = request.settings.run_dir
    path = Path(wanted) if wanted else new_run_path(request.recipe.name)
    if not request.resume and is_run(path):
        raise UserError(
            f"{path} already holds a run. Continue it with: samestep train {path} --resume; "
            "or choose another --run-dir."
        )
    return path


def _build(request: Request, world: World, received: Received) -> tuple[Job, Splits, int]:
    """Build model, data and optimizer; nothing is written yet, so a mistake leaves no trace."""
    settings, recipe = request.settings, request.recipe
    check_precision(settings.precision, world.device)
    dtype = data_dtype(settings.precision)
    seed_alike(settings.seed)
    splits = load_splits(recipe, request.options, world)

    def source(data: Any) -> Source:
        return open_source(data, recipe, world, seed=settings.seed, dtype=dtype,
                           num_workers=settings.num_workers)  # fmt: skip

    train_source = source(splits.train)
    num_samples = _agree_on_size(train_source, world)
    plan = world.on_every(
        lambda: make_plan(settings, num_samples, world.world_size, resumed=request.resume)
    )
    seed_alike(settings.seed)
    model = world.on_every(
        lambda: prepare(recipe.build_model(request.options), settings, world, dtype)
    )
    seed_rank(settings.seed, world.rank)
    cores = usable_cores()
    neighbours = world.gather((world.node, cores)).count((world.node, cores))
    threads = choose_threads(settings.threads, model, len(cores), neighbours)
    torch.set_num_threads(threads)
    compiles = what_compiles(settings, world, model)
    # Inside of what connects the ranks: DDP's own code breaks a graph that begins outside of it.
    forward: nn.Module = model
    if compiles == "model":
        forward = cast("nn.Module", torch.compile(model, dynamic=False))
    optimizer = make_optimizer(model.parameters(), settings, plan.lr, world.device)
    trainee = Trainee(
        model=model,
        wrapped=wrap(forward, world),
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
        step=make_step(compiles, trainee, settings, world, plan, per_block),
        train=train_source,
        validation=source(splits.validation) if splits.validation is not None else None,
        metrics=recipe.metrics,
        agreement=Agreement(world, received, settings.checkpoint_every_minutes),
        watch=_watch(request, splits),
        classes=splits.classes,
        save=lambda _job, _name, _metric: {},
    )
    return job, splits, threads


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


def _saver(
    request: Request, path: Path, step: int, world: World
) -> Callable[[Job, str, float | None], Record]:
    """Return what saves a job that goes on from this step."""
    folder = path / "checkpoints"
    # Those of later steps were passed over as damaged, and their steps are trained again.
    index = world.on_main(lambda: checkpoint.read_index(folder).up_to(step))

    def save(job: Job, name: str, metric: float | None) -> Record:
        nonlocal index
        state = capture(job, request.recipe.name)

        def write() -> Record:
            nonlocal index
            digest = checkpoint.save(folder, name, state)
            entry = checkpoint.Entry(path=name, step=job.position.step,
                                     epoch=state["position"]["epoch"], sha256=digest,
                                     metric=metric)  # fmt: skip
            index = replace(index, monitor=job.watch.metric, mode=job.watch.mode)
            index = checkpoint.announce(folder, index, entry, job.settings.keep_top_k)
            return {"event": "checkpoint", "step": job.position.step,
                    "path": f"checkpoints/{name}", "sha256": digest}  # fmt: skip

        return world.on_main(write)

    return save


def _resume(request: Request, job: Job, path: Path, world: World) -> tuple[str, list[str]] | None:
    """Bring the job to the newest whole checkpoint; return its name and what was passed over."""
    if not request.resume or not world.on_main(lambda: is_run(path)):
        return None
    # Rank 0 chooses, so that all ranks take the same file; each then reads it for itself.
    found = world.on_main(lambda: _newest(path))
    if found is None:
        return None
    entry, problems = found
    state = world.on_every(lambda: checkpoint.load(path / "checkpoints", entry))
    restore(job, request.recipe.name, state)
    return entry.path, problems


def _newest(path: Path) -> tuple[checkpoint.Entry, list[str]] | None:
    found = checkpoint.load_newest(path / "checkpoints")
    if found is None and any(r["event"] == "checkpoint" for r in read_records(path)):
        raise UserError(
            f"{path / 'checkpoints' / 'index.json'} names no checkpoint, though the run announced "
            "some. Restore it from a backup, or start a new run."
        )
    return (found[0], found[2]) if found else None


def _emitter(run: Run | None, show: Show) -> Show:
    def emit(record: Record) -> None:
        if run is None:
            return
        if record["event"] != "progress":
            run.append(record)
        show(record)

    return emit


def _describe(run: Run, request: Request, job: Job, threads: int) -> None:
    world = job.world
    write_text(run.path / "settings.toml", to_toml(request, job.plan))
    kept = run.path / RECIPE_COPY
    if request.source.endswith(".py") and not kept.exists():
        write_text(kept, Path(request.source).read_text(encoding="utf-8"))
    run.write_environment({
        "versions": versions(),
        "world_size": world.world_size,
        "num_nodes": world.num_nodes,
        "launcher": world.launcher,
        "device": str(world.device),
        "backend": world.backend,
        "threads": threads,
    })  # fmt: skip


def _start_record(
    request: Request, job: Job, splits: Splits, path: Path, threads: int, resumed: object
) -> Record:
    world = job.world
    notes = _notes(request, job, path, resumed=resumed is not None)
    return {
        "event": "start",
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


def _drive(job: Job, emit: Show, started_at: float) -> float | None:
    """Run the loop; return the seconds from the user's command to the end of the first step."""
    first_step_s: float | None = None
    for record in train(job):
        if first_step_s is None:
            first_step_s = time.time() - started_at
        emit(record)
    return first_step_s
