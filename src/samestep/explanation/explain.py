"""Explain a training before it runs: build it for a world that is only imagined, and look at it."""

from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from samestep.data.recipe_splits import load_splits
from samestep.errors import UserError
from samestep.explanation.calendar import Event, Kept, calendar, first_stop, kept_files
from samestep.explanation.checkpoint_size import checkpoint_bytes
from samestep.explanation.other_sizes import OtherSize, other_sizes
from samestep.explanation.rank_memory import Drawn, RankMemory, is_too_large, measure
from samestep.explanation.rates import Rate, rates
from samestep.explanation.shares import StepShares, evaluation_shares, full_step, last_step
from samestep.ranks.world import ImaginedWorld, World
from samestep.run.directory import is_run
from samestep.run.index import read_index
from samestep.run.records import read_records
from samestep.session.build import Built, build, planned
from samestep.session.notes import notes_of
from samestep.session.request import Request
from samestep.session.resuming import Resumed, go_on, newest_whole
from samestep.session.training_run import choose_path, completed
from samestep.settings import Settings
from samestep.training.alike import seed_alike
from samestep.training.device import data_dtype, switched
from samestep.training.evaluation import evaluation_batch
from samestep.training.plan import Plan
from samestep.training.prepare import prepare
from samestep.training.side_effects import batch_norms
from samestep.training.work import Work


@dataclass(frozen=True, kw_only=True)
class GoesOn:
    """From where a run goes on."""

    checkpoint: str
    """File name; empty where there is none yet, and the training begins."""
    step: int
    epoch: int
    """Epochs finished."""
    ranks_before: int
    """On how many it was trained last; 0 where no record says so."""
    problems: tuple[str, ...]
    changes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Evaluations:
    """What is evaluated, and in which portions."""

    num_samples: int | None
    """Of the validation set; None where there is none, or of a stream."""
    has_validation: bool
    batch_size: int
    """Samples of a rank, or of a virtual one, in a forward."""
    share: tuple[int, int] | None
    """The fewest and the most samples that one of them evaluates."""
    monitor: str
    mode: str
    """"min" or "max"."""
    has_test: bool


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """All that follows from the settings, the data, the model and the number of ranks."""

    recipe: str
    run: str
    """The directory that it goes on in, or that was asked for; empty for a new one in runs/."""
    settings: Settings
    world: World
    device: str
    """What it is explained for: cpu, cuda or mps."""
    plan: Plan
    step: StepShares
    last_step: StepShares | None
    """Of an epoch, where it has fewer samples than the others."""
    rates: tuple[Rate, ...]
    optimizer: str
    """The name of its class; a recipe may make its own."""
    memory: RankMemory | None
    drawn: Drawn | None
    not_measured: str
    """Why there is no memory to tell of; empty otherwise."""
    accepts: tuple[str, ...]
    others: tuple[OtherSize, ...]
    goes_on: GoesOn | None
    evaluations: Evaluations
    events: tuple[Event, ...] | None
    """None where nobody knows the length, or there are too many."""
    kept: Kept | None
    stops_first: Event | None
    checkpoint_bytes: int | None
    notes: tuple[str, ...]


def explain(request: Request, world: ImaginedWorld, device: str) -> Explanation:
    """Return what a training would do, and leave no trace of it.

    Args:
        request: the recipe, its options, the settings, and whether to resume.
        world: the ranks that are imagined; this process stands in for rank 0, on the CPU.
        device: where the training would be: cpu, cuda or mps.

    Raises:
        UserError: for anything that the training would refuse.
    """
    threads = torch.get_num_threads()
    try:
        with switched(request.settings, world.device):
            return _explain(request, world, device)
    finally:
        torch.set_num_threads(threads)


def _explain(request: Request, world: ImaginedWorld, device: str) -> Explanation:
    path = choose_path(request)
    request = completed(request, world)
    settings, recipe = request.settings, request.recipe
    world = replace(world, virtual_ranks=settings.virtual_ranks or 0)
    built, why = _build(request, world, device)
    with closing(built.work):
        plan = _plan(request, built, world)
        told = replace(built, work=_as_asked(built.work, settings, plan, device))
        resumed = _go_on(request, told, path)
        before = read_index(path / "checkpoints").up_to(built.state.position.step)
        shares = full_step(plan, settings, world)
        memory, drawn, problem = _measured(request, built, plan, shares.most, device, why)
        events = calendar(
            plan, settings, built.state.position, evaluates=built.splits.validation is not None
        )
        return Explanation(
            recipe=recipe.name,
            run=str(path) if request.resume or settings.run_dir else "",
            settings=settings,
            world=world,
            device=device,
            plan=plan,
            step=shares,
            last_step=last_step(plan, settings, world),
            rates=rates(plan, settings, built.state.position.step),
            optimizer=type(built.work.learner.optimizer).__name__,
            memory=memory,
            drawn=drawn,
            not_measured=problem,
            accepts=recipe.accepts,
            others=other_sizes(request, plan),
            goes_on=_goes_on(built, path, resumed) if request.resume else None,
            evaluations=_evaluations(settings, plan, built),
            events=events,
            kept=None if events is None else kept_files(events, settings.keep_top_k, before),
            stops_first=first_stop(settings.patience, events or (), built.state.watch),
            checkpoint_bytes=checkpoint_bytes(request, told) if memory is not None else None,
            notes=(
                *built.splits.notes,
                *notes_of(request, told, path, resumed=resumed is not None),
            ),
        )


def _build(request: Request, world: ImaginedWorld, device: str) -> tuple[Built, str]:
    """Return the training as it is built, and why its model cannot be tried here if it cannot.

    No loader process is started and nothing is compiled. A model for another device may not run on
    the CPU: then it is built and not tried.
    """
    # SyncBatchNorm is refused on a CPU, so it is left out of what stands in for a GPU.
    synchronised = request.settings.sync_batchnorm and device == "cpu"
    settings = replace(request.settings, compile="off", num_workers=0, sync_batchnorm=synchronised)
    plain = replace(request, settings=settings)
    # Ranks that prepare data together would wait for each other.
    seed_alike(settings.seed)
    splits = load_splits(request.recipe, request.options, World())
    try:
        return build(plain, world, splits=splits), ""
    except UserError as error:
        if device == "cpu":
            raise
        return build(plain, world, splits=splits, tries=False), str(error)


def _plan(request: Request, built: Built, world: ImaginedWorld) -> Plan:
    """Return the plan of the settings as they were asked for."""
    work, settings = built.work, request.settings
    if settings.sync_batchnorm and not batch_norms(work.learner.model):
        prepare(work.learner.model, settings, World(), data_dtype(settings.precision))  # refuses it
    return planned(request, work.train.num_samples, world.world_size)


def _as_asked(work: Work, settings: Settings, plan: Plan, device: str) -> Work:
    """Return the work as the training would have it: with its settings, on its device."""
    world = replace(work.world, device=torch.device(device))
    return replace(work, settings=settings, plan=plan, world=world)


def _go_on(request: Request, built: Built, path: Path) -> Resumed | None:
    """Bring a training to where its run stands, and leave the run's directory as it is."""
    if not request.resume or not is_run(path):
        return None
    found = newest_whole(path)
    return None if found is None else go_on(request, built.work, built.state, path, found)


def _goes_on(built: Built, path: Path, resumed: Resumed | None) -> GoesOn:
    position = built.state.position
    starts = [r["world_size"] for r in read_records(path) if r["event"] == "start"]
    return GoesOn(
        checkpoint=resumed.checkpoint if resumed else "",
        step=position.step,
        epoch=position.epoch,
        ranks_before=starts[-1] if starts else 0,
        problems=tuple(resumed.problems if resumed else ()),
        changes=tuple(resumed.changes if resumed else ()),
    )


def _measured(
    request: Request, built: Built, plan: Plan, rows: int, device: str, why: str
) -> tuple[RankMemory | None, Drawn | None, str]:
    """Return what a step held and drew, or why that cannot be said."""
    if not why and is_too_large(built.work.learner.model):
        why = "A step of this model needs more memory than is free on this machine."
    if why:
        return None, None, why
    try:
        return (*measure(request, built, plan, rows), "")
    except UserError as error:
        if device == "cpu":  # the training would say the same
            raise
        return None, None, str(error)
    except Exception as error:  # whatever a recipe's own operations do where they are watched
        return None, None, f"{type(error).__name__}: {error}"


def _evaluations(settings: Settings, plan: Plan, built: Built) -> Evaluations:
    work, watch = built.work, built.state.watch
    known = work.validation.num_samples if work.validation is not None else 0
    return Evaluations(
        has_validation=work.validation is not None,
        num_samples=known or None,
        batch_size=evaluation_batch(settings, plan.micro_batch_size),
        share=evaluation_shares(known, work.world) if known else None,
        monitor=watch.metric,
        mode=watch.mode,
        has_test=built.splits.test is not None,
    )
