"""Profile a recipe: its own loop, its own settings, some steps of them."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from samestep.data.batches import open_split
from samestep.data.memory_source import MemorySource
from samestep.errors import UserError
from samestep.execution.build import Built, build
from samestep.execution.request import Request
from samestep.execution.session import choose_path, describe
from samestep.machine import usable_cores
from samestep.profiling.bottleneck import judge
from samestep.profiling.costs import checkpoint_seconds, evaluation_seconds, every
from samestep.profiling.measured import MeasuredSteps
from samestep.profiling.profile_result import Profile, Sweep
from samestep.profiling.stages import Stages
from samestep.profiling.sweep import sweep, variant
from samestep.profiling.time_account import TimeAccount
from samestep.profiling.tracing import Traced
from samestep.ranks.world import World
from samestep.run.directory import Run, new_run_path
from samestep.training.loop import rehearse
from samestep.training.precision import data_dtype
from samestep.training.work import ENDLESS, State, Work, epoch_is_full


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What a profile of a recipe is to find out, beside the verdict."""

    workers: tuple[int, ...] = ()
    batch_sizes: tuple[int, ...] = ()
    epoch: int | None = None
    seconds: float = 3.0
    begin: Callable[[Path], None] = lambda _path: None
    """Called on every rank with the directory once it is there."""


def profile_recipe(request: Request, world: World, wishes: Wishes) -> Profile:
    """Measure some steps of a recipe on this world, and judge them.

    Raises:
        UserError: a wish cannot be met, or a file not be written.
    """
    if request.settings.engine != "native":
        raise UserError(
            "samestep profile RECIPE measures samestep's own loop: leave --engine out. Any script "
            "can be profiled too, one with Lightning's Trainer as well: samestep profile SCRIPT.py"
        )
    settings = replace(request.settings, run_dir=_path(request, world))
    if settings.epochs is None and settings.max_steps is None:
        settings = replace(settings, max_steps=ENDLESS)
    request = replace(request, settings=settings)
    path = Path(str(request.settings.run_dir))
    built = build(request, world)
    work = built.work
    if wishes.workers and isinstance(work.train, MemorySource):
        raise UserError(
            f"--workers: {request.recipe.name} holds its data in memory, so no worker reads it. "
            "Leave --workers out.",
            on_all_ranks=True,
        )
    _check_batch_sizes(wishes.batch_sizes, work)
    world.on_main(lambda: _open(path, request, built))
    world.on_every(lambda: wishes.begin(path))
    measured = measure(work, built.state, path, wishes)
    sweeps = _sweep(request, built, path, wishes)
    work.train.close()
    traces = [f"traces/{p.name}" for p in sorted((path / "traces").glob("trace_*"))]
    return Profile(
        name=request.recipe.name,
        path=path,
        measured=measured,
        verdict=judge(measured),
        sweeps=sweeps,
        traces=tuple(traces),
        precision=request.settings.precision,
    )


def _check_batch_sizes(sizes: tuple[int, ...], work: Work) -> None:
    """Refuse batches that the training set does not fill."""
    ranks, samples = work.world.world_size, work.train.num_samples
    for size in sizes:
        if size * ranks > samples:
            raise UserError(
                f"--batch-sizes: {size:,} samples a rank, {size * ranks:,} a step, are more than "
                f"the {samples:,} training samples. Leave {size} out.",
                on_all_ranks=True,
            )


def _path(request: Request, world: World) -> str:
    if request.settings.run_dir is not None:
        return str(world.on_main(lambda: choose_path(request)))
    return str(world.on_main(lambda: new_run_path(f"profile-{request.recipe.name}")))


def _open(path: Path, request: Request, built: Built) -> None:
    run = Run(path)
    try:
        describe(run, request, built)
    finally:
        run.close()


def measure(work: Work, state: State, path: Path, wishes: Wishes) -> MeasuredSteps:
    """Measure some steps without the profiler and trace some with it, on every rank."""
    world = work.world
    stages = run_stages(work, state, seconds=wishes.seconds, epoch=wishes.epoch)
    assert stages.span is not None
    span = stages.span
    mine = span.per_step(_keep(stages, work, path))
    cores = usable_cores()
    between = every(work)
    evaluation = 0.0
    if work.validation is not None:
        evaluation = evaluation_seconds(work) / between["evaluation"]
    return MeasuredSteps(
        ranks=tuple(world.gather(mine)),
        steps=span.steps,
        wall=span.seconds / span.steps,
        samples=work.plan.global_batch_size,
        evaluation=evaluation,
        checkpoint=checkpoint_seconds(work, state, path) / between["checkpoint"],
        device=world.device.type,
        cores=len(cores),
        local_ranks=world.gather((world.node, cores)).count((world.node, cores)),
        threads=torch.get_num_threads(),
        workers=work.settings.num_workers,
        in_memory=isinstance(work.train, MemorySource),
        gradient_bytes=sum(p.nbytes for p in work.trainee.model.parameters() if p.requires_grad),
        compiled=work.settings.compile == "on",
        counts=between,
    )


def _keep(stages: Stages, work: Work, path: Path) -> Traced:
    tracer = stages.tracer
    assert tracer is not None
    name = f"rank{work.world.rank}_workers_{work.settings.num_workers}"
    return work.world.on_every(lambda: tracer.keep(path / "traces", name))


def run_stages(work: Work, state: State, *, seconds: float, epoch: int | None = None) -> Stages:
    """Train through warm-up, measured and traced steps."""
    world = work.world
    stages = Stages(
        TimeAccount(lambda: work.phases),
        agree=lambda function: world.broadcast(function() if world.is_main else 0),
        seconds=seconds,
        epoch=epoch,
    )
    stages.epoch_begins(state.position.epoch + 1)
    for _ in rehearse(work.endless(), state):
        stages.at(state.position.step)
        if epoch_is_full(work, state):
            stages.epoch_begins(state.position.epoch + 2)
        if stages.done:
            break
    return stages


def _sweep(request: Request, built: Built, path: Path, wishes: Wishes) -> tuple[Sweep, ...]:
    """Measure the wished workers, then the wished batch sizes with the best of them."""
    work, world = built.work, built.work.world

    def candidate(**changes: Any) -> Work:
        settings = replace(work.settings, **changes)
        if "batch_size" in changes:
            settings = replace(settings, global_batch_size=None, accumulate=None)
        dtype = data_dtype(settings.precision)
        source = open_split(built.splits.train, work.world, request.recipe, settings, dtype)
        return variant(work, settings, source)

    def look(one: Work, state: State) -> None:
        if one.settings.num_workers != work.settings.num_workers:  # that has its trace already
            _keep(run_stages(one, state, seconds=0.2), one, path)

    # More workers than cores are worth a try: some only wait for a disk.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    sweeps = []
    best = work.settings.num_workers
    if wishes.workers:
        values = wishes.workers
        workers = sweep(world, "num_workers", values, lambda n: candidate(num_workers=n), look)
        sweeps.append(workers)
        best = workers.best
    if wishes.batch_sizes:
        sizes = wishes.batch_sizes
        of_best = partial(candidate, num_workers=best)
        sweeps.append(sweep(world, "batch_size", sizes, lambda n: of_best(batch_size=n)))
    return tuple(sweeps)
