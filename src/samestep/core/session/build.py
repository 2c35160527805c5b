"""Build what a training needs: data, model, optimizer."""

from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from samestep.base.errors import UserError, defined_at, made_by
from samestep.base.machine import usable_cores
from samestep.base.phases import make_phases
from samestep.base.settings import Settings, canonical_names
from samestep.core.data.keyed_random import seed_alike, seed_rank
from samestep.core.data.memory_source import MemorySource
from samestep.core.data.order import held_parts
from samestep.core.data.recipe_data import in_one_order, load_splits, open_split
from samestep.core.data.source import Source
from samestep.core.learner.agreement import (
    check_same_arithmetic,
    check_same_model,
    check_same_samples,
    random_numbers,
)
from samestep.core.learner.apply import (
    Moment,
    applied,
    evaluating,
    measure_of,
    summed,
    terms_of,
    timed,
)
from samestep.core.learner.device import (
    check_precision,
    choose_allocation,
    choose_threads,
    data_dtype,
    make_scaler,
    model_cost,
    return_freed_memory,
    share_of_scale,
)
from samestep.core.learner.model_state import ModelTrial
from samestep.core.learner.optimizer import check_groups, has_modes, optimizer_of
from samestep.core.learner.optimizer_state import groups_of
from samestep.core.learner.prepare import Wrap, is_fsdp, make_counter, place_loss, prepare, wrap
from samestep.core.learner.unkept import Unkept, of_data
from samestep.core.plan import Plan, learning_rate, make_plan
from samestep.core.recipe import Recipe, Splits
from samestep.core.session.request import Request
from samestep.core.training.dry_run import Tried, dry_run, of_one_sample
from samestep.core.training.metrics import EpochMetrics, in_training
from samestep.core.training.steps import Compiles, RenewableStep, make_step, what_compiles
from samestep.core.training.stopping import Watch
from samestep.core.training.work import Learner, State, Step, Work
from samestep.launch.ranks.mesh import any_sharded
from samestep.launch.ranks.world import World

if TYPE_CHECKING:
    from samestep.core.learner.after_epoch import AfterEpoch
    from samestep.core.learner.averages import Average, OwnAverage
    from samestep.core.learner.batch_transform import BatchTransform
    from samestep.core.learner.scheduler import Scheduler
    from samestep.core.session.initial_weights import InitialWeights

# What few trainings need is imported where they do.


@dataclass(frozen=True)
class Built:
    """A training that is about to begin."""

    work: Work
    state: State
    splits: Splits
    threads: int
    """CPU threads of this rank."""
    unkept: Unkept
    initial: "InitialWeights | None" = None
    """What the weights were before the first step, if model() has not made them."""


def build(
    request: Request,
    world: World,
    wrap_model: Wrap = wrap,
    splits: Splits | None = None,
    *,
    tries: bool = True,
    holds_norms: bool = False,
) -> Built:
    """Build model, data and optimizer; nothing is written yet, so a mistake leaves no trace.

    `wrap_model` puts the model on all ranks; `splits` are data that is loaded already. With `tries`
    a few samples go through the model, and metrics that do not fit the data are left out.
    `holds_norms`: batch normalisation will be held still, as in a verification.
    """
    settings, recipe = request.settings, request.recipe
    world = replace(world, virtual_ranks=settings.virtual_ranks or 0)
    check_precision(settings.precision, world.device)
    check_same_arithmetic(world)
    if settings.threads is not None:  # with virtual ranks it is, and data() may compute, too
        torch.set_num_threads(settings.threads)
    choose_allocation(world.device, sharded=is_fsdp(settings, world))
    seed_alike(settings.seed)
    splits = in_one_order(splits, world) if splits else load_splits(recipe, request.options, world)
    phases = make_phases(world.device)
    dtype = data_dtype(settings.precision)
    source = partial(open_split, world=world, recipe=recipe, settings=settings, dtype=dtype)
    train = source(splits.train, lap=phases.lap, split="training")
    _agree_on_size(train, world)
    plan = world.on_every(lambda: planned(request, train, world.world_size))
    model, takes, restores, initial = _build_model(request, world, dtype, moment := Moment())
    seed_rank(settings.seed, world.rank)
    threads = _share_cores(request, model, world, train)
    loss, evaluation_loss = _placed_losses(recipe, world.device, dtype)
    validation, by_name = _held_out(splits, source)
    arguments = (settings, world, takes, None if holds_norms else of_one_sample(plan, settings))
    trial = partial(dry_run, model, loss, evaluation_loss, recipe, splits, train, *arguments)
    tried = Tried(recipe.metrics)
    if tries:
        tried = _try_out(trial, validation, splits.test, source, world)
        for other in [*by_name.values()][1:]:
            _try_out(trial, other, None, source, world)
        unkept = tried.unkept._replace(**of_data(train, splits.train, recipe, settings, world))
        tried = tried._replace(unkept=unkept)
    metrics, parts, evaluation_parts = tried.metrics, tried.parts, tried.evaluation_parts
    own = _own_parts(recipe, train, by_name=bool(parts))
    compiles = what_compiles(settings, world, model, own=own)
    evaluation_loss = evaluating(recipe, evaluation_loss, moment, evaluation_parts)
    loss = timed(loss, moment)
    loss = summed(loss, recipe.loss_weights, parts) if parts else loss
    recipe = replace(recipe, loss=loss, metrics=metrics)
    learner, wrapped = _make_learner(
        recipe, takes, model, settings, world, plan, compiles, wrap_model, train, tried
    )
    learner = replace(learner, own=own, moment=moment)
    make = partial(make_step, compiles, settings=settings, world=world, plan=plan)
    most = train.steps_per_block(plan.global_batch_size)
    make = partial(make, steps_per_block=most, phases=phases)
    learner, step, after_epoch = _make_steps(
        recipe, learner, make, wrapped, world, settings.seed, tried
    )
    work = Work(
        settings=settings,
        plan=plan,
        world=world,
        learner=learner,
        step=step,
        after_epoch=after_epoch,
        batch_transform=_batch_transform(recipe, settings, world),
        train=train,
        validation=validation,
        by_name=by_name,
        evaluation_loss=evaluation_loss,
        evaluation_parts=evaluation_parts,
        metrics=metrics,
        measure=measure_of(recipe, model, tried.measured),
        trial=restores,
        phases=phases,
        classes=splits.classes,
        cost=model_cost(tried.forward_flops, settings, world),
    )
    state = State(
        **_watches(settings, recipe, splits, tried),
        measured=EpochMetrics(
            {} if recipe.batch_transform else metrics,
            world.device,
            held_parts(world),
            by_step=world.virtual_ranks > 0,
        ),
    )
    _check_followed(learner, plan, state.watch, splits, _measured_names(recipe, splits, tried))
    if is_fsdp(settings, world):
        return_freed_memory(world.device)
    if settings.compile == "on":
        from samestep.core.training.compiled import with_forward  # noqa: PLC0415

        work = with_forward(work)
    return Built(work, state, splits, threads, tried.unkept, initial)


def _build_model(
    request: Request, world: World, dtype: torch.dtype, moment: Moment
) -> "tuple[nn.Module, nn.Module, ModelTrial, InitialWeights | None]":
    """Return the model, what takes inputs (shared out if wanted), its trial, --init-from."""
    settings, recipe = request.settings, request.recipe
    seed_alike(settings.seed)
    new, placed = partial(recipe.build_model, request.options), made_by(recipe.model)(prepare)
    make, shares_out = new, is_fsdp(settings, world)
    if shares_out:
        from samestep.core.learner import sharding  # noqa: PLC0415

        make = partial(sharding.build_once, new, world)
    model = world.on_every(lambda: placed(make(), settings, world, dtype))
    check_same_model(model, world)
    source, strict = settings.init_from, settings.init_strict
    initial = None
    if source is not None:
        from samestep.core.session.initial_weights import start_from  # noqa: PLC0415

        initial = start_from(model, Path(source), world, strict=strict)
    restores = ModelTrial(model)  # before it is shared out or compiled
    takes = applied(model, recipe, moment, compiles=settings.compile == "on")
    if shares_out:
        sharding.shard(model, takes, recipe, settings, world)
    return model, takes, restores, initial


def _batch_transform(recipe: Recipe, settings: Settings, world: World) -> "BatchTransform | None":
    if recipe.batch_transform is None:
        return None
    from samestep.core.learner.batch_transform import BatchTransform  # noqa: PLC0415

    return BatchTransform(recipe, settings, world)


def _held_out(
    splits: Splits, opened: Callable[..., Source]
) -> tuple[Source | None, dict[str, Source]]:
    """Return the source of the validation data (the first of several), and all sets by name."""
    given = splits.by_name.items()
    by_name = {name: opened(data, split=f"validation/{name}") for name, data in given}
    if by_name or splits.validation is None:
        return next(iter(by_name.values()), None), by_name
    return opened(splits.validation, split="validation"), {}


def _placed_losses(recipe: Recipe, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return the loss of the training, and that of evaluations, which may be the same."""
    loss = place_loss(recipe.loss, device, dtype)
    own = recipe.evaluation_loss
    return loss, loss if own is None else place_loss(own, device, dtype)


def planned(request: Request, train: Source | Plan, world_size: int) -> Plan:
    """Return the plan of a request on `world_size` ranks, by its data or its plan on others."""
    by_tokens = train.by_tokens if isinstance(train, Plan) else train.token_cut
    options: dict[str, Any] = {"schedule": request.recipe.schedule, "by_tokens": by_tokens}
    return make_plan(request.settings, train.num_samples, world_size, **options)


def _own_parts(recipe: Recipe, train: Source, *, by_name: bool) -> tuple[str, ...]:
    """Return the names of parts that compiled whole steps cannot take."""
    collates = train.collates and recipe.collate is None  # by the function of a loader
    more = {"stream": train.is_stream, "collate": collates, "losses by name": by_name}
    return (*recipe.own_parts(), *(name for name, has in more.items() if has))


def _make_learner(
    recipe: Recipe,
    takes: nn.Module,
    model: nn.Module,
    settings: Settings,
    world: World,
    plan: Plan,
    compiles: Compiles,
    wrap_model: Wrap,
    train: Source,
    tried: Tried,
) -> tuple[Learner, Callable[[nn.Parameter | None], nn.Module]]:
    """Put a built model on all ranks, and give it what changes it; return how it was put there."""
    sharded = any_sharded(model)
    if compiles == "model" and sharded:
        from samestep.core.learner.sharding import compile_blocks  # noqa: PLC0415

        compile_blocks(takes)

    def wrapped(counter: nn.Parameter | None) -> nn.Module:
        inner = takes
        if compiles == "model" and not sharded:
            # First compile, then wrap: DDP breaks a graph that starts outside it.
            inner = cast("nn.Module", torch.compile(takes, dynamic=False))
        return wrap_model(inner, world, settings, counter)

    terms = terms_of(recipe)
    numbers = int(terms is not None) + (1 + len(tried.parts) if world.elastic else 0)
    counter = make_counter(world, settings, numbers)
    # Code between two steps may change what model and loss read. This package's functions do not.
    between = [recipe.schedule, recipe.transform, recipe.augment, *recipe.metrics.values()]
    functions = [f.func if isinstance(f, partial) else f for f in between if f is not None]
    built_in = all(getattr(f, "__module__", "").startswith("samestep.") for f in functions)
    optimizer = world.on_every(lambda: optimizer_of(recipe, model, settings, plan.lr, world.device))
    initial = () if recipe.optimizer is None else groups_of(optimizer)  # what no scheduler has set
    carried, share = None, share_of_scale(world.world_size, world.virtual_ranks)
    if recipe.carry is not None:
        from samestep.core.learner.carried import carried_of  # noqa: PLC0415

        carried = carried_of(recipe.carry, settings, plan, world)
    learner = Learner(
        model=model,
        applied=takes,
        wrapped=wrapped(counter),
        optimizer=optimizer,
        scheduler=world.on_every(lambda: _scheduler_of(plan, settings, optimizer)),
        optimizer_maker=recipe.optimizer,
        made=initial,
        carried=carried,
        over_batch=recipe.loss_over == "batch",
        # Of mixed samples they would say nothing.
        measured=bool(in_training(recipe.metrics)) and recipe.batch_transform is None,
        sharded=sharded,
        alone=built_in and isinstance(train, MemorySource),
        average=average_of(model, settings, optimizer, frozen=recipe.after_epoch is not None),
        scaler=make_scaler(settings.precision, world.device, share),
        loss=recipe.loss,
        reduction=recipe.reduction,
        terms=terms,
        counter=counter,
        parts=tried.parts,
        makers=(recipe.model, recipe.data),
    )
    return learner, wrapped


def _make_steps(
    recipe: Recipe,
    learner: Learner,
    make: Callable[[Learner], Step],
    wrapped: Callable[[nn.Parameter | None], nn.Module],
    world: World,
    seed: int,
    tried: Tried,
) -> "tuple[Learner, Step, AfterEpoch | None]":
    """Return the learner, what takes its steps, and what calls the recipe's `after_epoch`.

    With that, the steps may be built anew, so nothing else keeps the first ones.
    """
    step = make(learner)
    if recipe.after_epoch is None:
        return learner, step, None
    from samestep.core.learner.after_epoch import AfterEpoch  # noqa: PLC0415

    bare = replace(learner, wrapped=learner.applied)
    again = RenewableStep(step, lambda: make(replace(bare, wrapped=wrapped(bare.counter))))
    taken = {*recipe.metrics, *tried.parts, *tried.evaluation_parts, *tried.measured}
    called = AfterEpoch(
        recipe.after_epoch, bare.model, bare.optimizer, world, seed, taken, again.renew
    )
    return bare, again, called


def average_of(
    model: nn.Module, settings: Settings, optimizer: torch.optim.Optimizer, *, frozen: bool = False
) -> "Average | OwnAverage | None":
    """Return the average whose weights are evaluated, or None if those trained are.

    `frozen`: whether some that are not trained yet will be.
    """
    if settings.ema is None and not has_modes(optimizer):
        return None
    from samestep.core.learner.averages import Average, OwnAverage  # noqa: PLC0415

    if settings.ema is None:
        return OwnAverage(model, optimizer)
    return Average(model, settings.ema, frozen=frozen)


def _scheduler_of(
    plan: Plan, settings: Settings, optimizer: torch.optim.Optimizer
) -> "Scheduler | None":
    if plan.makes_scheduler:
        from samestep.core.learner.scheduler import Scheduler  # noqa: PLC0415

        return Scheduler(plan, optimizer)
    if plan.schedule is not None:
        with made_by(plan.schedule):
            check_groups(optimizer, learning_rate(plan, settings, 0))
    return None


def _check_followed(
    learner: Learner, plan: Plan, watch: Watch, splits: Splits, names: list[str]
) -> None:
    """Check that what a schedule follows is measured, and that it looks the same way."""
    plateaus = () if learner.scheduler is None else learner.scheduler.plateaus
    place = defined_at(plan.schedule)
    if splits.validation is None and (plateaus or "metrics" in plan.schedule_asks):
        raise UserError(
            f"The recipe's schedule{place} follows a validation metric, but the recipe has no "
            "validation data. Add it with Splits(validation=…), or use another schedule."
        )
    for name in {followed for _, followed in plateaus if followed} - {*names}:
        raise UserError(
            f"ReduceLROnPlateau{place} has the monitor {name!r}, but the recipe measures "
            f"{', '.join(names)}."
        )
    for mode in {plateau.mode for plateau, followed in plateaus if not followed} - {watch.mode}:
        raise UserError(
            f"ReduceLROnPlateau(mode={mode!r}){place} follows {watch.metric}, of which the "
            f"{'highest' if watch.mode == 'max' else 'lowest'} value is the best. Write "
            f"mode={watch.mode!r}, or name another metric in the recipe's settings: "
            "'monitor': 'loss'."
        )


def _try_out(
    trial: Callable[..., Tried],
    validation: Source | None,
    test: Any,
    opened: Callable[..., Source],
    world: World,
) -> Tried:
    """Try a recipe on what is evaluated first; return what that tells."""
    _agree_on_stream(validation)
    tested: AbstractContextManager[Source | None] = nullcontext()
    if test is not None:  # else a mistake in it would end the run after the training
        later = validation is not None  # only looked at, on the host
        host = {"world": replace(world, device=torch.device("cpu"))} if later else {}
        tested = closing(opened(test, split="test", **host))
    with tested as other:
        _agree_on_stream(other)
        tried = world.on_every(lambda: trial(other if validation is None else validation))
    # A dict's order may differ between the ranks, which add up what it holds in one order.
    names = ("parts", "evaluation_parts", "measured")
    agreed = world.broadcast([getattr(tried, name) for name in names])
    return tried._replace(**dict(zip(names, agreed, strict=True)))


def _share_cores(request: Request, model: nn.Module, world: World, train: Source) -> int:
    """Set the number of threads of this rank, among those with the same cores; return it."""
    cores = usable_cores()
    neighbours = world.gather((world.node, cores)).count((world.node, cores))
    settings = request.settings
    # A resumed run may be as slow as it was.
    if not isinstance(train, MemorySource) and not (settings.oversubscribe or request.resume):
        from samestep.launch.ranks.nproc import check_workers  # noqa: PLC0415 - of loaders only

        world.on_every(lambda: check_workers(settings.num_workers, neighbours, len(cores)))
    threads = choose_threads(settings.threads, model, len(cores), neighbours)
    torch.set_num_threads(threads)
    return threads


def _agree_on_size(source: Source, world: World) -> None:
    """Check that all ranks have as many training samples, in the same order."""
    _agree_on_stream(source)
    ranks = world.gather((source.num_samples, source.order_record()))
    sizes = [size for size, _ in ranks]
    if len(set(sizes)) > 1:
        raise UserError(
            f"The ranks loaded data of different sizes: {sizes}. Each must load all of it; "
            "samestep divides it among the ranks.",
            on_all_ranks=True,
        )
    for rank, (_, order) in enumerate(ranks):
        if differing := [name for name in order if order[name] != ranks[0][1].get(name)]:
            raise UserError(
                f"Rank {rank} has different {differing[0]} of the training samples from rank 0. "
                "Compute them only from the data, or with a seeded generator.",
                on_all_ranks=True,
            )
    if world.connected and isinstance(source, MemorySource):
        check_same_samples(world.gather(source.marks()))


def _agree_on_stream(source: Source | None) -> None:
    """Let all ranks see whether a stream, if it is one, is the same on each of them."""
    if source is not None and source.is_stream:
        with random_numbers(0):
            source.agree()


def _measured_names(recipe: Recipe, splits: Splits, tried: Tried) -> list[str]:
    """Return the names of what a validation measures."""
    metrics, parts = in_training(recipe.metrics), tried.evaluation_parts
    names = [*dict.fromkeys(("loss", *parts, *metrics, *tried.measured, *tried.computed))]
    return names + [f"{of}/{name}" for of in splits.by_name for name in names]


def _watches(settings: Settings, recipe: Recipe, splits: Splits, tried: Tried) -> dict[str, Any]:
    """Return what chooses the best checkpoint, and what --patience follows if that is another."""
    names = _measured_names(recipe, splits, tried)
    falling = (*recipe.falling(), *tried.evaluation_parts)
    if splits.validation is None:
        for name in ("patience", "monitor", "halving"):
            if getattr(settings, name) is not None:
                raise UserError(f"--{name} needs validation data, and the recipe has none.")

    def watched(flag: str, name: str, mode: str) -> Watch:
        if name not in names:
            raise UserError(f"--{flag} {name}: the recipe measures {', '.join(names)}.")
        if mode == "auto":
            mode = "min" if splits.plain_name(name) in falling else "max"
        return Watch(metric=name, mode=mode)

    metric = settings.monitor or ("accuracy" if "accuracy" in names else "loss")
    watch = watched("monitor", metric, settings.mode)
    own = canonical_names({"monitor": settings.stop_monitor or metric}, "stop_monitor")
    mode = own.get("mode", "auto") if settings.stop_monitor else watch.mode
    stops = watched("stop-monitor", own["monitor"], mode)
    return {"watch": watch, "stops": None if stops == watch else stops}
