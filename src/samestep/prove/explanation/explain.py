"""Explain a training before it runs: build it for imagined ranks, and measure it."""

from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from msgspec import to_builtins

from samestep.base.errors import UserError
from samestep.base.machine import free_memory_bytes
from samestep.base.run.directory import is_run
from samestep.base.run.index import read_index
from samestep.base.run.records import read_records
from samestep.base.settings import Settings, as_table
from samestep.core.data.keyed_random import seed_alike
from samestep.core.data.recipe_data import load_splits
from samestep.core.learner.device import data_dtype, switched
from samestep.core.learner.optimizer_state import kind_of
from samestep.core.learner.prepare import prepare
from samestep.core.learner.side_effects import batch_norms
from samestep.core.plan import ENDLESS, Plan
from samestep.core.session.build import Built, build, planned
from samestep.core.session.notes import notes_of
from samestep.core.session.request import Request
from samestep.core.session.restoring import Loaded, as_built, go_on
from samestep.core.session.training_run import choose_path, completed, retention_of
from samestep.core.training.evaluation import evaluation_batch
from samestep.launch.ranks.world import ImaginedWorld, World
from samestep.prove.explanation import rank_memory, schedule
from samestep.prove.explanation.rank_memory import Drawn, RankMemory, StrategyMemory, WholeMatrices
from samestep.prove.explanation.schedule import KeptFiles, OtherSize, PlannedEvent, Rate, StepShares


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """Where a run is resumed."""

    checkpoint: str
    """File name; empty if there is none yet, and the training begins."""
    step: int
    epoch: int  # epochs finished
    ranks_before: int  # on how many it was trained last; 0 if unknown
    problems: tuple[str, ...]
    changes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Evaluations:
    """What is evaluated, and in which portions."""

    num_samples: int | None
    """Of the validation set; None if there is none, or if it is a stream."""
    has_validation: bool
    batch_size: int  # samples in a forward
    share: tuple[int, int] | None
    """The fewest and the most samples that a rank, or a virtual one, evaluates."""
    monitor: str
    mode: str  # "min" or "max"
    has_test: bool


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """All that follows from the settings, the data, the model and the number of ranks."""

    recipe: str
    run: str
    """The directory that is resumed, or named by --run-dir; empty for a new one in runs/."""
    settings: Settings
    world: World
    device: str  # cpu, cuda or mps
    plan: Plan
    step: StepShares
    last_step: StepShares | None  # of an epoch, if it has fewer samples than the others
    rates: tuple[Rate, ...]
    scheduler: str
    """The class of the recipe's scheduler and after what it is stepped; empty without one."""
    optimizer: str  # the name of its class
    memory: RankMemory | None
    whole_matrices: WholeMatrices | None  # what Muon takes while it steps; None of other optimizers
    strategies: dict[str, StrategyMemory]
    """What a rank would hold by each of --strategy on these ranks; empty for a single rank."""
    drawn: Drawn | None
    not_measured: str  # why there is no `memory`; empty otherwise
    accepts: tuple[str, ...]
    others: tuple[OtherSize, ...]
    goes_on: ResumePoint | None
    evaluations: Evaluations
    events: tuple[PlannedEvent, ...] | None
    """None if the length is unknown, or if there are too many."""
    kept: KeptFiles | None
    stops_first: PlannedEvent | None
    checkpoint_bytes: int | None
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return all numbers; unknown ones are None."""
        # Settings and the world hold what JSON cannot.
        own = {"settings", "world", "plan", "others", "memory", "strategies"}
        plain = replace(self, memory=None, others=())
        return {
            **{name: to_builtins(value) for name, value in vars(plain).items() if name not in own},
            "plan": self.plan.record(),
            "ranks": {
                "world_size": self.world.world_size,
                "num_nodes": self.world.num_nodes,
                "ranks_per_node": self.world.local_world_size,
                "backend": self.world.backend,
            },
            "settings": as_table(self.settings),
            "memory": self.memory and {**asdict(self.memory), "total_bytes": self.memory.total},
            "strategies": {name: asdict(memory) for name, memory in self.strategies.items()},
            "others": [
                {**asdict(o), "total_steps": o.total_steps if o.total_steps < ENDLESS else None}
                for o in self.others
            ],
        }


def explain(request: Request, world: ImaginedWorld, device: str) -> Explanation:
    """Explain a training on a device; this process is rank 0 of an imagined world."""
    threads = torch.get_num_threads()
    try:
        with switched(request.settings, world.device):
            return _explain(request, world, device)
    finally:
        torch.set_num_threads(threads)


def _explain(request: Request, world: ImaginedWorld, device: str) -> Explanation:
    path, free = choose_path(request), free_memory_bytes()
    request = completed(request, world)
    settings, recipe = request.settings, request.recipe
    world = replace(world, virtual_ranks=settings.virtual_ranks or 0)
    built, why = _build(as_built(request, path, World()), world, device)
    with closing(built.work):
        model = built.work.learner.model
        if settings.sync_batchnorm and not batch_norms(model):
            prepare(model, settings, World(), data_dtype(settings.precision))  # refuses it
        plan = planned(request, built.work.train, world.world_size)
        # As the training would have it: with its settings, on its device.
        own_world = replace(built.work.world, device=torch.device(device))
        work = replace(built.work, settings=settings, plan=plan, world=own_world)
        as_trained = replace(built, work=work)
        resumes = request.resume and is_run(path)
        resumed = go_on(request, work, built.state, path, World()) if resumes else None
        before = read_index(path / "checkpoints").up_to(built.state.position.step)
        shares = schedule.full_step(plan, settings, world)
        memory, drawn, problem = _measured(request, built, plan, shares.most, device, why)
        events = schedule.planned_events(
            plan, settings, built.state.position, evaluates=built.splits.validation is not None
        )
        scheduler, stops = built.work.learner.scheduler, built.state.stops or built.state.watch
        unknown = events is None or schedule.saves_the_best(settings, events)
        kept_files = (
            None if unknown else schedule.kept_files(events or (), retention_of(settings), before)
        )
        size = None if memory is None else rank_memory.checkpoint_bytes(request, as_trained)
        strategies, memory = _by_strategy(as_trained, memory, world, recipe.shard, free)
        return Explanation(
            recipe=recipe.name,
            run=str(path) if request.resume or settings.run_dir else "",
            settings=settings,
            world=world,
            device=device,
            plan=plan,
            step=shares,
            last_step=schedule.last_step(plan, settings, world),
            rates=schedule.rates(plan, settings, built),
            scheduler="; ".join(
                f"{type(part).__name__}, stepped after each {when}"
                for part, when in (scheduler.parts if scheduler else ())
            ),
            optimizer=kind_of(built.work.learner.optimizer),
            memory=memory,
            whole_matrices=rank_memory.whole_matrices(built.work.learner.optimizer, settings),
            strategies=strategies,
            drawn=drawn,
            not_measured=problem,
            accepts=recipe.accepts,
            others=schedule.other_sizes(request, plan),
            goes_on=_goes_on(built, path, resumed) if request.resume else None,
            evaluations=_evaluations(settings, plan, built),
            events=events,
            kept=kept_files,
            stops_first=schedule.first_stop(settings.patience, events or (), stops),
            checkpoint_bytes=size,
            notes=(
                *built.splits.notes,
                *notes_of(request, as_trained, path, resumed=resumed is not None),
            ),
        )


def _build(request: Request, world: ImaginedWorld, device: str) -> tuple[Built, str]:
    """Build the training, without loader processes or compiling; also return a problem.

    A model for another device may not run on the CPU: then the problem says why it was not tried.
    """
    # SyncBatchNorm is refused on a CPU, so it is left out of what stands in for a GPU.
    synchronised = request.settings.sync_batchnorm and device == "cpu"
    settings = replace(request.settings, compile="off", num_workers=0, sync_batchnorm=synchronised)
    plain = replace(request, settings=settings)
    seed_alike(settings.seed)
    # Ranks that prepare data together would wait for each other.
    splits = load_splits(request.recipe, request.options, World())
    try:
        return build(plain, world, splits=splits), ""
    except UserError as error:
        if device == "cpu":
            raise
        return build(plain, world, splits=splits, tries=False), str(error)


def _goes_on(built: Built, path: Path, resumed: Loaded | None) -> ResumePoint:
    starts = [r["world_size"] for r in read_records(path) if r["event"] == "start"]
    return ResumePoint(
        checkpoint=resumed.entry.path if resumed else "",
        step=built.state.position.step,
        epoch=built.state.position.epoch,
        ranks_before=starts[-1] if starts else 0,
        problems=tuple(resumed.problems if resumed else ()),
        changes=tuple(resumed.changes if resumed else ()),
    )


def _measured(
    request: Request, built: Built, plan: Plan, rows: int, device: str, why: str
) -> tuple[RankMemory | None, Drawn | None, str]:
    if not why and rank_memory.is_too_large(built.work.learner.model):
        why = "A step of this model needs more memory than is free on this machine."
    if not why:
        try:
            return (*rank_memory.measure(request, built, plan, rows), "")
        except UserError as error:
            if device == "cpu":  # the training would say the same
                raise
            why = str(error)
        except Exception as error:  # whatever a recipe's own operations do where they are watched
            why = f"{type(error).__name__}: {error}"
    return None, None, why


def _by_strategy(
    built: Built,
    memory: RankMemory | None,
    world: World,
    classes: tuple[type, ...],
    free: int | None,
) -> tuple[dict[str, StrategyMemory], RankMemory | None]:
    """Return the memory of each strategy on these ranks, and that of the chosen one."""
    learner, here, settings = built.work.learner, world.local_world_size, built.work.settings
    if world.world_size == 1:
        return {}, memory
    by = here if settings.shard_within == "node" else world.world_size
    estimate = memory or rank_memory.least_memory(learner.model, learner.optimizer)
    shared = rank_memory.shared_out(estimate, learner.model, classes, by)
    complete, device = memory is not None, built.work.world.device.type
    strategies = {
        name: rank_memory.fitting(on_rank, device, here, free, complete=complete)
        for name, on_rank in (("ddp", estimate), ("fsdp", shared))
    }
    return strategies, shared if complete and settings.strategy == "fsdp" else memory


def _evaluations(settings: Settings, plan: Plan, built: Built) -> Evaluations:
    work, watch = built.work, built.state.watch
    sizes = [source.num_samples for source in work.sources()[1:]]
    shares = [schedule.evaluation_shares(size, work.world) for size in sizes if size]
    fewest, most = (sum(counts) for counts in zip((0, 0), *shares, strict=True))
    return Evaluations(
        has_validation=work.validation is not None,
        num_samples=sum(sizes) or None,
        batch_size=evaluation_batch(settings, plan.evaluated_at_once),
        share=(fewest, most) if shares else None,
        monitor=watch.metric,
        mode=watch.mode,
        has_test=built.splits.test is not None,
    )
