"""Profile a recipe: its own loop, its own settings, some steps of them."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from samestep.data.batches import Source, open_source
from samestep.data.blocks import Block
from samestep.data.memory import MemorySource
from samestep.errors import UserError
from samestep.execution.request import Request
from samestep.execution.session import NATIVE, build_job, choose_path, describe
from samestep.machine import usable_cores
from samestep.profiling.bottleneck import judge
from samestep.profiling.costs import checkpoint_seconds, evaluation_seconds, every
from samestep.profiling.measured import MeasuredRank, MeasuredSteps
from samestep.profiling.profile_result import Profile, Sweep
from samestep.profiling.stages import Stages
from samestep.profiling.sweep import ENDLESS, sweep, variant
from samestep.profiling.time_account import TimeAccount
from samestep.profiling.tracing import Traced
from samestep.ranks.world import World
from samestep.recipe import Splits
from samestep.run.directory import Run, new_run_path
from samestep.training.loop import Job, train
from samestep.training.precision import data_dtype
from samestep.training.step import EagerStep, StepResult
from samestep.training.stopping import Received


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
    job, splits, threads = build_job(request, world, Received(), NATIVE)
    if wishes.workers and isinstance(job.train, MemorySource):
        raise UserError(
            f"--workers: {request.recipe.name} holds its data in memory, so no worker reads it. "
            "Leave --workers out.",
            on_all_ranks=True,
        )
    _check_batch_sizes(wishes.batch_sizes, job)
    world.on_main(lambda: _open(path, request, job, threads))
    world.on_every(lambda: wishes.begin(path))
    measured = measure(job, path, wishes, evaluates=job.validation is not None)
    sweeps = _sweep(request, job, splits, path, wishes)
    job.train.close()
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


def _check_batch_sizes(sizes: tuple[int, ...], job: Job) -> None:
    """Refuse batches that the training set does not fill."""
    ranks, samples = job.world.world_size, job.train.num_samples
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


def _open(path: Path, request: Request, job: Job, threads: int) -> None:
    run = Run(path)
    try:
        describe(run, request, job, threads)
    finally:
        run.close()


def measure(job: Job, path: Path, wishes: Wishes, *, evaluates: bool) -> MeasuredSteps:
    """Measure some steps of a job without the profiler and trace some with it, on every rank."""
    world = job.world
    stages = run_stages(job, seconds=wishes.seconds, epoch=wishes.epoch)
    assert stages.span is not None
    span = stages.span
    kept = _keep(stages, job, path)
    mine = MeasuredRank(
        phases={phase: seconds / span.steps for phase, seconds in span.phases.items()},
        operations=kept.operations,
        starved=span.cores.waited / span.steps,
        wanted_cores=span.cores.wanted,
        memory=kept.memory,
    )
    cores = usable_cores()
    between = every(job)
    return MeasuredSteps(
        ranks=tuple(world.gather(mine)),
        steps=span.steps,
        wall=span.seconds / span.steps,
        samples=job.plan.global_batch_size,
        evaluation=evaluation_seconds(job) / between["evaluation"] if evaluates else 0.0,
        checkpoint=checkpoint_seconds(job, path) / between["checkpoint"],
        device=world.device.type,
        cores=len(cores),
        local_ranks=world.gather((world.node, cores)).count((world.node, cores)),
        threads=torch.get_num_threads(),
        workers=job.settings.num_workers,
        in_memory=isinstance(job.train, MemorySource),
        gradient_bytes=sum(p.nbytes for p in job.trainee.model.parameters() if p.requires_grad),
        compiled=job.settings.compile == "on",
        counts=between,
    )


def _keep(stages: Stages, job: Job, path: Path) -> Traced:
    tracer = stages.tracer
    assert tracer is not None
    name = f"rank{job.world.rank}_workers_{job.settings.num_workers}"
    return job.world.on_every(lambda: tracer.keep(path / "traces", name))


def run_stages(job: Job, *, seconds: float, epoch: int | None = None) -> Stages:
    """Let a job train through warm-up, measured and traced steps."""
    world = job.world
    stages = Stages(
        TimeAccount(lambda: job.phases),
        agree=lambda function: world.broadcast(function() if world.is_main else 0),
        seconds=seconds,
        epoch=epoch,
    )
    alone = endless(job)
    alone.step = cast("EagerStep", _Probe(job.step, stages, alone))
    try:
        for _ in train(alone):
            pass
    except _Done:
        return stages
    raise AssertionError("a profiled job trains until it is told to stop")


def endless(job: Job) -> Job:
    """Return the same job without an end, and without evaluations and checkpoints."""
    settings = replace(
        job.settings,
        eval_every_steps=None,
        checkpoint_every_steps=None,
        patience=None,
        checkpoint_every_minutes=None,
    )
    return replace(
        job,
        settings=settings,
        plan=replace(job.plan, total_steps=ENDLESS),
        validation=None,
        save=lambda *_: {"event": "checkpoint"},
    )


def _sweep(
    request: Request, job: Job, splits: Splits, path: Path, wishes: Wishes
) -> tuple[Sweep, ...]:
    """Measure the wished workers, then the wished batch sizes with the best of them."""

    def source(workers: int) -> Source:
        return open_source(
            splits.train,
            request.recipe,
            job.world,
            seed=job.settings.seed,
            dtype=data_dtype(job.settings.precision),
            num_workers=workers,
        )

    def candidate(**changes: Any) -> Job:
        settings = replace(job.settings, **changes)
        if "batch_size" in changes:
            settings = replace(settings, global_batch_size=None, accumulate=None)
        return variant(job, settings, source(settings.num_workers))

    def look(one: Job) -> None:
        if one.settings.num_workers != job.settings.num_workers:  # that has its trace already
            _keep(run_stages(one, seconds=0.2), one, path)

    # More workers than cores are worth a try: some only wait for a disk.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    sweeps = []
    best = job.settings.num_workers
    if wishes.workers:
        sweeps.append(
            sweep(
                job.world, "num_workers", wishes.workers, lambda n: candidate(num_workers=n), look
            )
        )
        best = sweeps[-1].best
    if wishes.batch_sizes:
        sweeps.append(
            sweep(
                job.world,
                "batch_size",
                wishes.batch_sizes,
                lambda n: candidate(batch_size=n, num_workers=best),
            )
        )
    return tuple(sweeps)


class _Done(BaseException):
    """The stages need no more steps."""


class _Probe:
    """A job's step that first tells how many there have been."""

    def __init__(self, step: EagerStep, stages: Stages, job: Job) -> None:
        self._step, self._stages, self._job = step, stages, job
        self._epoch = 0
        self.steps_per_call = step.steps_per_call
        self.notes = step.notes

    def __call__(self, block: Block, step: int, lrs: list[float], *, want_norm: bool) -> StepResult:
        """Take the steps of a block."""
        epoch = self._job.position.epoch + 1
        done = self._stages.at(step)
        if epoch != self._epoch:
            self._epoch = epoch
            done = self._stages.epoch_begins(epoch) or done
        if done:
            raise _Done
        return self._step(block, step, lrs, want_norm=want_norm)
