"""Profile a recipe: its own loop, its own settings, some steps of them."""

import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from samestep.data.batches import open_split
from samestep.data.memory_source import MemorySource
from samestep.errors import UserError
from samestep.machine import usable_cores
from samestep.profiling.bottleneck import judge
from samestep.profiling.costs import checkpoint_seconds, evaluation_seconds, every
from samestep.profiling.measured import MeasuredRank, MeasuredSteps
from samestep.profiling.profile_result import Profile, Sweep
from samestep.profiling.stages import Stages
from samestep.profiling.sweep import sweep, variant
from samestep.profiling.time_account import MeasuredSpan, TimeAccount
from samestep.ranks.world import World
from samestep.reporting.words import count
from samestep.run.directory import Run, new_run_path
from samestep.session.build import Built, build
from samestep.session.request import Request
from samestep.session.training_run import choose_path, completed, describe
from samestep.training.device import data_dtype, switched
from samestep.training.loop import rehearse
from samestep.training.plan import ENDLESS
from samestep.training.stopping import ReceivedSignal, Watch, catch_signals
from samestep.training.work import State, Work, epoch_is_full


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What a profile of a recipe is to find out, beside the verdict."""

    workers: tuple[int, ...] = ()
    batch_sizes: tuple[int, ...] = ()
    epoch: int | None = None
    seconds: float = 3.0
    num_steps: int | None = None
    """Steps to measure, in place of the seconds."""
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
    with switched(request.settings, world.device):
        return _profile(request, world, wishes)


def _profile(request: Request, world: World, wishes: Wishes) -> Profile:
    settings = request.settings
    if settings.epochs is None and settings.max_steps is None:
        settings = replace(settings, max_steps=ENDLESS)
    new_path = partial(new_run_path, f"profile-{request.recipe.name}")
    if settings.run_dir is not None:
        new_path = partial(choose_path, request)
    path = Path(world.on_main(new_path))
    request = replace(request, settings=replace(settings, run_dir=str(path)))
    request = completed(request, world)
    built = build(request, world)
    work = built.work
    if wishes.workers and isinstance(work.train, MemorySource):
        raise UserError(
            f"--workers: {request.recipe.name} holds its data in memory, so no worker reads it. "
            "Leave --workers out.",
            on_all_ranks=True,
        )
    samples = work.train.num_samples  # 0 of a stream
    for size in wishes.batch_sizes:
        if samples and size > samples:
            raise UserError(
                f"--batch-sizes: {size:,} samples per step are more than the {samples:,} training "
                f"samples. Leave {size} out.",
                on_all_ranks=True,
            )
        if size < world.num_parts:
            raise UserError(
                f"--batch-sizes: {size} samples per step are less than the {world.num_parts} "
                f"ranks. Leave {size} out.",
                on_all_ranks=True,
            )

    def begin() -> None:
        with closing(Run(path)) as run:
            describe(run, request, built)

    world.on_main(begin)
    world.on_every(lambda: wishes.begin(path))
    with catch_signals() as received:

        def stop() -> bool:
            return bool(world.broadcast(received.signum if world.is_main else 0))

        measured = measure(work, built.state, path, wishes, received)
        sweeps = _sweep(request, built, path, wishes, stop)
        measured = replace(measured, stopped=measured.stopped or stop())
    work.train.close()
    return Profile(
        name=request.recipe.name,
        path=path,
        measured=measured,
        verdict=judge(measured),
        sweeps=sweeps,
        traces=tuple(f"traces/{p.name}" for p in sorted((path / "traces").glob("trace_*"))),
        precision=request.settings.precision,
    )


def measure(
    work: Work, state: State, path: Path, wishes: Wishes, received: ReceivedSignal
) -> MeasuredSteps:
    """Measure some steps without the profiler and trace some with it, on every rank."""
    world = work.world
    span, mine, stopped = _run_stages(work, state, path, wishes, received)
    cores = usable_cores()
    between = every(work)
    return MeasuredSteps(
        ranks=tuple(world.gather(mine)),
        steps=span.steps,
        wall=span.seconds / span.steps,
        samples=work.plan.global_batch_size,
        # After a stop signal there may be no time for them.
        evaluation=0.0 if stopped else evaluation_seconds(work) / between["evaluation"],
        checkpoint=0.0
        if stopped
        else checkpoint_seconds(work, state, path) / between["checkpoint"],
        device=world.device.type,
        cores=len(cores),
        local_ranks=world.gather((world.node, cores)).count((world.node, cores)),
        threads=torch.get_num_threads(),
        workers=work.settings.num_workers,
        in_memory=isinstance(work.train, MemorySource),
        gradient_bytes=sum(p.nbytes for p in work.learner.model.parameters() if p.requires_grad),
        compiled=work.settings.compile == "on",
        stopped=stopped,
        counts=between,
    )


def _run_stages(
    work: Work, state: State, path: Path, wishes: Wishes, received: ReceivedSignal
) -> tuple[MeasuredSpan, MeasuredRank, bool]:
    """Train through warm-up, measured and traced steps; keep the trace.

    Returns:
        What was measured, also of this rank, and whether a stop signal ended it early.

    Raises:
        UserError: the stop signal came before there was anything to tell.
    """
    world = work.world
    stages = Stages(
        TimeAccount(lambda: work.phases),
        agree=lambda function: world.broadcast(function() if world.is_main else 0),
        seconds=wishes.seconds,
        num_steps=wishes.num_steps,
        epoch=wishes.epoch,
        stop=lambda: received.signum != 0,
    )
    stages.epoch_begins(state.position.epoch + 1)
    for _ in rehearse(work.endless(), state):
        stages.at(state.position.step)
        if epoch_is_full(work, state):
            stages.epoch_begins(state.position.epoch + 2)
        if world.world_size == 1 and received.signum and not stages.done:
            stages.end()
        if stages.done:
            break
    span, tracer = stages.span, stages.tracer
    if span is None:
        raise UserError(
            f"A stop signal came after {count(state.position.step, 'step')}: too few to tell "
            "anything.",
            on_all_ranks=True,
        )
    if tracer is None or not tracer.steps:
        return span, span.rank, stages.stopped
    name = f"rank{world.rank}_workers_{work.settings.num_workers}"
    operations, memory = world.on_every(lambda: tracer.keep(path / "traces", name))
    return span, replace(span.rank, operations=operations, memory=memory), stages.stopped


def _sweep(
    request: Request, built: Built, path: Path, wishes: Wishes, stop: Callable[[], bool]
) -> tuple[Sweep, ...]:
    """Measure the wished workers, then the wished batch sizes with the best of them."""
    work, best = built.work, built.work.settings

    def candidate(setting: str, value: int) -> tuple[Work, State]:
        changes: dict[str, Any] = {setting: value}
        if setting == "batch_size":
            changes |= dict.fromkeys(("batch_size_per_rank", "micro_batch_size", "accumulate"))
        settings = replace(best, **changes)
        dtype = data_dtype(settings.precision)
        source = open_split(built.splits.train, work.world, request.recipe, settings, dtype)
        one, state = variant(work, settings, source), State(watch=Watch(metric="loss", mode="min"))
        if settings.num_workers != best.num_workers:  # that has its trace already
            _run_stages(one, state, path, Wishes(seconds=0.2), ReceivedSignal())
        return one, state

    # More workers than cores are worth a try: some only wait for a disk.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    sweeps: list[Sweep] = []
    for setting, values in (("num_workers", wishes.workers), ("batch_size", wishes.batch_sizes)):
        if values and not stop():
            sweeps.append(sweep(work.world, setting, values, partial(candidate, setting), stop))
            chosen: dict[str, Any] = {setting: sweeps[-1].best}
            best = replace(best, **chosen)
    return tuple(sweeps)
