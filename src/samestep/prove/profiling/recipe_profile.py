"""Profile a recipe: its own loop, its own settings, some steps of them."""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from samestep.base.errors import UserError
from samestep.base.machine import usable_cores
from samestep.base.run import checkpoints
from samestep.base.run.directory import Run, new_run_path
from samestep.base.run.host_copy import HostCopies
from samestep.base.words import count
from samestep.core.data.memory_source import MemorySource
from samestep.core.data.recipe_data import open_split
from samestep.core.data.source import Batch, Source
from samestep.core.learner.device import data_dtype, switched
from samestep.core.plan import ENDLESS
from samestep.core.session.build import Built, build
from samestep.core.session.request import Request
from samestep.core.session.training_run import choose_path, completed, describe
from samestep.core.training.evaluation import evaluation_batch
from samestep.core.training.loop import evaluate_work, rehearse
from samestep.core.training.snapshot import capture
from samestep.core.training.stopping import ReceivedSignal, Watch, catch_signals
from samestep.core.training.work import State, Work, epoch_is_full
from samestep.launch.ranks import watched
from samestep.launch.ranks.world import World
from samestep.prove.profiling.tried_values import sweep, variant
from samestep.scripts.measuring.bottleneck import diagnose
from samestep.scripts.measuring.measured import Extent, MeasuredRank, MeasuredSteps
from samestep.scripts.measuring.profile_report import Profile, Sweep
from samestep.scripts.measuring.stages import MeasuredSpan, Stages, TimeAccount
from samestep.scripts.measuring.tracing import unwritable

_LONGEST_EVALUATION_S = 2.0
_CHECKPOINT = "profile.pt"


def profile_recipe(
    request: Request,
    world: World,
    extent: Extent,
    tried: Mapping[str, tuple[int, ...]],
    begin: Callable[[Path], None],
) -> Profile:
    """Measure and judge some steps; try the values in `tried`; `begin` gets the run directory."""
    if request.settings.engine != "native":
        raise UserError(
            "samestep profile RECIPE measures samestep's own loop: leave --engine out. Any script "
            "can be profiled too, one with Lightning's Trainer as well: samestep profile SCRIPT.py"
        )
    settings = request.settings
    if settings.epochs is None and settings.max_steps is None:
        settings = replace(settings, max_steps=ENDLESS)
    new_path = partial(new_run_path, f"profile-{request.recipe.name}")
    if settings.run_dir is not None:
        new_path = partial(choose_path, request)
    path = Path(world.on_main(new_path))
    request = replace(request, settings=replace(settings, run_dir=str(path)))

    def write_description() -> None:
        with closing(Run(path)) as run:
            describe(run, request, built)

    def stop() -> bool:
        return bool(world.broadcast(received.now if world.is_main else 0))

    with switched(settings, world.device):
        request = completed(request, world)
        built = build(request, world)
        _check_values(tried, built.work, request.recipe.name)
        world.on_main(write_description)
        world.on_every(lambda: begin(path))
        with catch_signals() as received:
            measured = measure(built.work, built.state, path, extent, received)
            sweeps = _sweep(request, built, path, tried, stop)
            measured = replace(measured, stopped=measured.stopped or stop())
        built.work.train.close()
    return Profile(
        name=request.recipe.name,
        path=path,
        measured=measured,
        verdict=diagnose(measured),
        sweeps=sweeps,
        traces=tuple(f"traces/{p.name}" for p in sorted((path / "traces").glob("trace_*"))),
        precision=request.settings.precision,
    )


def _check_values(tried: Mapping[str, tuple[int, ...]], work: Work, recipe: str) -> None:
    samples, ranks = work.train.num_samples, work.world.num_parts
    if tried["num_workers"] and isinstance(work.train, MemorySource):
        raise UserError(
            f"--workers: {recipe} holds its data in memory, so workers have nothing to read. "
            "Leave --workers out.",
            on_all_ranks=True,
        )
    for size in tried["batch_size"]:
        if size < ranks or 0 < samples < size:  # 0 of a stream
            limit = f"more than the {samples:,} training samples"
            limit = f"less than the {ranks} ranks" if size < ranks else limit
            raise UserError(
                f"--batch-sizes: {size:,} samples per step are {limit}. Leave {size} out.",
                on_all_ranks=True,
            )


def measure(
    work: Work, state: State, path: Path, extent: Extent, received: ReceivedSignal
) -> MeasuredSteps:
    """Measure some steps without the profiler and trace some with it, on every rank."""
    world = work.world
    span, mine, stopped = _run_stages(work, state, path, extent, received)
    cores = usable_cores()
    between, plan = _steps_between(work), work.plan
    # The last batch of an epoch may be much smaller than the others.
    mean = plan.global_batch_size if plan.is_stream else plan.num_samples / plan.steps_per_epoch
    return MeasuredSteps(
        ranks=tuple(world.gather(mine)),
        steps=span.steps,
        wall=span.seconds / span.steps,
        samples=min(plan.global_batch_size, mean),  # fewer than the mean with --drop-last
        # After a stop signal there may be no time left.
        evaluation=0.0 if stopped else _evaluation_seconds(work) / between["evaluation"],
        checkpoint=0.0
        if stopped
        else _checkpoint_seconds(work, state, path) / between["checkpoint"],
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
    work: Work, state: State, path: Path, extent: Extent, received: ReceivedSignal
) -> tuple[MeasuredSpan, MeasuredRank, bool]:
    """Train through warm-up, measured and traced steps; keep the trace.

    Returns the measured steps, this rank with its trace, and whether a stop signal ended it early.
    """
    world = work.world
    stages = Stages(
        TimeAccount(lambda: work.phases),
        lambda function: world.broadcast(function() if world.is_main else 0),
        extent,
        stop=lambda: received.now != 0,
    )
    stages.epoch_begins(state.position.epoch + 1)
    for _ in rehearse(work.endless(), state):
        stages.at(state.position.step)
        if epoch_is_full(work, state):
            stages.epoch_begins(state.position.epoch + 2)
        if world.world_size == 1 and received.now and not stages.done:
            stages.end()
        if stages.done:
            break
    watched.turn_to(watched.END)
    span, tracer = stages.span, stages.tracer
    if span is None:
        raise UserError(
            f"A stop signal came after {count(state.position.step, 'step')}: too few to measure.",
            on_all_ranks=True,
        )
    if tracer is None or not tracer.steps:
        return span, span.rank, stages.stopped
    name = f"rank{world.rank}_workers_{work.settings.num_workers}"
    operations, memory = world.on_every(lambda: tracer.keep(path / "traces", name))
    return span, replace(span.rank, operations=operations, memory=memory), stages.stopped


def _sweep(
    request: Request,
    built: Built,
    path: Path,
    tried: Mapping[str, tuple[int, ...]],
    stop: Callable[[], bool],
) -> tuple[Sweep, ...]:
    """Try numbers of workers, then batch sizes with the best of them."""
    work, best = built.work, built.work.settings

    def candidate(setting: str, value: int) -> tuple[Work, State]:
        changes: dict[str, Any] = {setting: value}
        if setting == "batch_size":
            others = ("batch_size_per_rank", "batch_tokens", "micro_batch_size", "accumulate")
            changes |= dict.fromkeys(others)
        settings = replace(best, **changes)
        dtype = data_dtype(settings.precision)
        source = open_split(
            built.splits.train, work.world, request.recipe, settings, dtype, split="training"
        )
        changed = variant(work, settings, source)
        state = State(watch=Watch(metric="loss", mode="min"))
        if settings.num_workers != best.num_workers:  # which is traced already
            _run_stages(changed, state, path, Extent(seconds=0.2), ReceivedSignal())
        return changed, state

    # More workers than cores are worth trying: some only wait for a disk.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    sweeps: list[Sweep] = []
    for setting, values in tried.items():
        if values and not stop():
            sweeps.append(sweep(work.world, setting, values, partial(candidate, setting), stop))
            chosen: dict[str, Any] = {setting: sweeps[-1].best}
            best = replace(best, **chosen)
    return tuple(sweeps)


def _steps_between(work: Work) -> dict[str, int]:
    settings, epoch, total_steps = work.settings, work.plan.steps_per_epoch, work.plan.total_steps
    evaluation = min(settings.eval_every_epochs * epoch, total_steps)  # both come at the end, too
    saving = min(settings.checkpoint_every_epochs * epoch, total_steps)
    return {
        "evaluation": min(evaluation, settings.eval_every_steps or evaluation),
        "checkpoint": min(saving, settings.checkpoint_every_steps or saving),
    }


def _evaluation_seconds(work: Work) -> float:
    """Return the seconds of an evaluation, extrapolated from a part of a long one."""
    if work.validation is None:
        return 0.0
    share = -(-work.validation.num_samples // work.world.world_size)
    part = _PartialSource(work.validation)
    evaluate_work(replace(work, forward=None), part)  # without compiling, which happens once
    if work.world.device.type == "cuda":  # the host was ahead; now it has read the sums
        part.times[-1] = time.perf_counter()
    batches = -(-share // evaluation_batch(work.settings, work.plan.evaluated_at_once))
    seconds = part.times[-1] - part.times[0]
    return max(work.world.gather(seconds / max(1, len(part.times) - 1) * batches))


class _PartialSource:
    """A source whose evaluation ends early and notes when each batch was done."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.times = [0.0]

    def evaluation(self, batch_size: int) -> Iterator[Batch]:
        """Yield batches until the time is up."""
        self.times = [time.perf_counter()]
        for batch in self._source.evaluation(batch_size):
            yield batch
            self.times.append(time.perf_counter())
            if self.times[-1] - self.times[0] > _LONGEST_EVALUATION_S:
                return

    def peek(self, samples: int) -> Batch:
        return self._source.peek(samples)


def _checkpoint_seconds(work: Work, state: State, path: Path) -> float:
    """Return the seconds that a checkpoint blocks the training: for its copy, or for all of it.

    With --checkpoint-sync it is written where the run's would be, and removed.
    """
    folder, copies = path / "checkpoints", HostCopies()
    content: dict[str, Any] = {}

    def write() -> None:
        try:
            checkpoints.save(folder, _CHECKPOINT, content)
        except UserError as error:
            raise unwritable(folder / _CHECKPOINT, error.__cause__ or error) from error
        (folder / _CHECKPOINT).unlink()

    def copy() -> None:
        copies.take(content)

    sync = work.settings.checkpoint_sync
    if not sync:
        content = capture(work, state, "profile")
        work.world.on_main(copy)  # the first one also gets its memory
    began = time.perf_counter()
    content = capture(work, state, "profile")
    work.world.on_main(write if sync else copy)
    return time.perf_counter() - began
