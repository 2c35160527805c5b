"""A few samples go through model, loss and metrics before the first step; nothing changes by it.

So parts that do not fit fail before anything is trained or written, not after an epoch.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from samestep.base.errors import UserError, defined_at, made_by
from samestep.base.run.checkpoints import why_not_kept
from samestep.base.run.records import TAKEN_IN_STEPS, TAKEN_NAMES
from samestep.base.settings import Precision, Settings
from samestep.core.data.memory_source import MemorySource
from samestep.core.data.order import step_range
from samestep.core.data.source import Batch, Source
from samestep.core.learner.agreement import random_numbers
from samestep.core.learner.apply import (
    Moment,
    applied,
    evaluating,
    measure_of,
    parts_of,
    summed,
    terms_of,
    timed,
    total_of,
)
from samestep.core.learner.device import autocast, count_flops
from samestep.core.learner.model_state import copied
from samestep.core.learner.side_effects import batch_norms, keep_buffers
from samestep.core.learner.unkept import Unkept, of_buffers, of_forward, of_loss, of_shares
from samestep.core.plan import Plan
from samestep.core.recipe import Recipe, Splits, accuracy
from samestep.core.recipe_checks import check_lower, check_names
from samestep.core.training.evaluation import Totals, as_evaluated, outputs_of
from samestep.launch.ranks.mesh import any_sharded, free_gathered
from samestep.launch.ranks.world import World

_SAMPLES = 8
_FEW = 2
"""Of which batch normalisation can still make a variance."""

Metrics = Mapping[str, Callable[[Any, Any], Tensor]]


class Tried(NamedTuple):
    """What a few samples have told of a recipe."""

    metrics: Metrics
    """Those that fit the data."""
    parts: tuple[str, ...] = ()
    """Names of the losses, where `loss` returns a dict."""
    evaluation_parts: tuple[str, ...] = ()
    """Those of what evaluations measure as the loss."""
    measured: tuple[str, ...] = ()
    """Names that `evaluate_batch` returns."""
    forward_flops: int = 0
    """Floating-point operations of a forward of one sample; 0 where they are not known."""
    unkept: Unkept = Unkept()
    """What no checkpoint holds, or each rank makes of its own samples."""
    computed: tuple[str, ...] = ()
    """Names of what metric objects compute, as far as they can yet."""


def dry_run(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    evaluation_loss: Callable[[Any, Any], Tensor],
    recipe: Recipe,
    splits: Splits,
    train: Source,
    settings: Settings,
    world: World,
    takes: nn.Module,
    alone: UserError | None,
    evaluated: Source | None,
) -> Tried:
    """Try a few samples on copies of model, loss and metrics; return what fits, and its names.

    If `evaluation_loss` is not `loss`, each is tried by itself. `takes` is what takes the inputs:
    the model, or the model by the recipe's `forward`; `alone` is raised where it would have to
    train on one sample and batch normalisation refuses that. A sharded model cannot be copied, and
    is tried itself; all ranks call it then.

    Where nothing is evaluated (`evaluated` is None) the samples are of the training set, and
    without metrics the first step reports what fails, before it changes anything.
    """
    made_by(recipe.model)(check_extra_state)(model)
    precision = settings.precision
    apart = evaluation_loss is not loss or recipe.batch_transform is not None
    told_later = evaluated is None and (apart or not recipe.metrics)
    measures = evaluated is not None and recipe.evaluate_batch is not None
    evaluated = train if evaluated is None else evaluated
    with random_numbers(0):
        batch = evaluated.peek(_SAMPLES)
    metrics = fitting_metrics(recipe.metrics, batch.targets)
    trial = _copied(model, loss, evaluation_loss, metrics, takes, recipe, measures=measures)
    if trial is None:
        return Tried(metrics)
    tried = trial.applied
    classes = recipe.counted_classes(splits) if splits.test is not None else ()
    if alone is not None:
        with _as_tried(recipe, trial, takes, model):
            _check_alone(alone, trial, train, precision, world)
    with _as_tried(recipe, trial, takes, model):
        parts, loss_state = None, None
        if apart:
            parts, loss_state = _trained_on(recipe, train, trial, settings, world)
        forward = partial(outputs_of, tried, batch.inputs, precision, world.device, recipe.model)
        named = partial(_names_of_losses, recipe, trial, batch.targets, forward)
        try:
            outputs, flops = count_flops(forward)
        except UserError:
            if told_later:
                return Tried(metrics, named() if parts is None else parts)
            raise
        flops //= max(1, batch.samples)
        for name, source in (("training", train), ("evaluated", evaluated)):
            _check_labels(name, source, outputs, loss)
        with autocast(precision, world.device):
            loss_of = evaluating(recipe, trial.evaluation_loss)
            _check_pairs(loss_of, outputs, batch.targets, evaluation_loss)
            if loss_state is None:
                loss_state = of_loss(trial.loss, loss_of, outputs, batch.targets)
            of_model = partial(_of_model, trial, recipe, train, evaluated, settings, world)
            if told_later:
                names = named(outputs) if parts is None else parts
                unkept = Unkept(loss_state, **of_model())
                return Tried(metrics, names, forward_flops=flops, unkept=unkept)
            measure = measure_of(recipe, trial.model) if measures else None
            terms = terms_of(recipe)
            totals = Totals(loss_of, trial.metrics, world, classes, terms, measure=measure)
            totals.add(outputs, batch)
            computed = tuple(totals.objects.check())
        unkept = Unkept(loss_state, **of_model())
    evaluation_parts, measured = tuple(totals.parts), tuple(totals.measured)
    parts = evaluation_parts if parts is None else parts
    tried_out = Tried(metrics, parts, evaluation_parts, measured, flops, unkept, computed)
    _check_names(recipe, tried_out)
    return tried_out


class _Trial(NamedTuple):
    model: nn.Module
    applied: nn.Module
    """What takes the inputs."""
    loss: Callable[[Any, Any], Any]
    evaluation_loss: Callable[[Any, Any], Any]
    """The loss of evaluations."""
    metrics: Metrics


def _copied(
    model: nn.Module,
    loss: Callable[[Any, Any], Any],
    evaluation_loss: Callable[[Any, Any], Any],
    metrics: Metrics,
    takes: nn.Module,
    recipe: Recipe,
    *,
    measures: bool,
) -> _Trial | None:
    """Return copies; None if some part cannot be copied, and is first tried when it counts."""
    try:
        uncopied = (takes, model) if any_sharded(model) else model.parameters()
        shared: dict[int, object] = {id(part): part for part in uncopied}
        twin = copied(model, shared)
        others: Any = copy.deepcopy((loss, evaluation_loss, dict(metrics)), shared)
        takes = takes if twin is model else applied(twin, recipe)
        return _Trial(twin, takes, *others)
    except Exception as error:
        if measures:
            raise UserError(
                "Recipe(evaluate_batch=…) is tried before the first step, and its model, loss or "
                f"metrics cannot be copied with copy.deepcopy: {error}"
            ) from error
        return None


@contextlib.contextmanager
def _as_tried(recipe: Recipe, trial: _Trial, takes: nn.Module, model: nn.Module) -> Iterator[None]:
    """Be in eval mode; mistakes name the recipe, and the model itself stays as it was."""
    with (
        made_by(recipe.model, recipe.data),
        as_evaluated(trial.model, seed=0),
        _undisturbed(takes, model),
    ):
        yield


def _trained_on(
    recipe: Recipe, train: Source, trial: _Trial, settings: Settings, world: World
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Try the loss of the training on samples of it; return its names, and what it keeps.

    That is for recipes whose evaluations measure another; the first step tells what fails.
    """
    with random_numbers(0):
        batch = _as_trained(recipe, settings, train.peek(_SAMPLES), world)
    total = summed(timed(trial.loss, Moment()), recipe.loss_weights)
    precision = settings.precision
    trial.applied.train()
    outputs = outputs_of(trial.applied, batch.inputs, precision, world.device, recipe.model)
    with autocast(precision, world.device):
        loss_state = of_loss(trial.loss, total, outputs, batch.targets)
        names = _names_of_losses(recipe, trial, batch.targets, lambda: outputs)
    trial.applied.eval()
    return names, loss_state


def _as_trained(recipe: Recipe, settings: Settings, batch: Batch, world: World) -> Batch:
    """Return samples as the recipe's `batch_transform` leaves them, if it can take so few."""
    if recipe.batch_transform is not None:
        from samestep.core.learner.batch_transform import BatchTransform  # noqa: PLC0415

        with contextlib.suppress(UserError):  # the first step tells it
            change = BatchTransform(recipe, settings, world).change
            inputs, targets = change(batch.inputs, batch.targets, batch.samples)
            return batch._replace(inputs=inputs, targets=targets)
    return batch


def of_one_sample(plan: Plan, settings: Settings) -> UserError | None:
    """Return the error for a model that cannot train on one sample, if a rank is given one."""
    if settings.sync_batchnorm or plan.is_stream:
        return None  # it may see those of other ranks, or comes of what is unknown
    sizes, subject, remedy = [plan.global_batch_size], "Each step", "Use fewer ranks, "
    if plan.by_tokens is not None:
        sizes, subject = [*{*plan.by_tokens.sizes}], "A step"
    elif plan.total_steps >= plan.steps_per_epoch and 1 not in plan.full_micro_steps():
        last = step_range(plan.num_samples, plan.global_batch_size, plan.steps_per_epoch - 1)
        sizes, subject, remedy = [len(last)], "The last step of an epoch", "Add --drop-last, "
    if not any(1 in plan.micro_steps_of(size) for size in sizes):
        return None
    cut = f"{plan.num_samples:,} samples in batches of {plan.global_batch_size:,}"
    ranks = f" on {plan.world_size} ranks" if plan.world_size > 1 else ""
    return UserError(
        f"{subject} ({cut}{ranks}) gives a rank a single sample, on which BatchNorm cannot train.",
        remedy=f"{remedy}or choose another --batch-size or --micro-batch-size.",
        flags=["batch_size"],
    )


def _check_alone(
    alone: UserError, trial: _Trial, train: Source, precision: Precision, world: World
) -> None:
    """Check that batch normalisation can train on one sample, as it can on an image."""
    trial.model.train()
    if not any(m.training for m in batch_norms(trial.model).values()):
        return
    with random_numbers(0):
        inputs = train.peek(1).inputs
    try:
        outputs_of(trial.applied, inputs, precision, world.device)
    except UserError as error:  # the first step tells of others
        if "Expected more than 1 value per channel" in str(error):
            raise alone from error


def _of_model(
    trial: _Trial,
    recipe: Recipe,
    train: Source,
    evaluated: Source,
    settings: Settings,
    world: World,
) -> dict[str, tuple[str, ...]]:
    """Return the state of the model that no checkpoint holds, as `Unkept` names it."""
    apply = partial(outputs_of, trial.applied, precision=settings.precision, device=world.device)
    total = summed(timed(trial.loss, Moment()), recipe.loss_weights)

    def forward(samples: int) -> Any:
        return apply(evaluated.peek(samples).inputs)

    @torch.no_grad()
    def loss(batch: Batch) -> Tensor:
        trial.applied.eval()
        with autocast(settings.precision, world.device):
            return total(apply(batch.inputs), batch.targets)

    others = recipe.carry or recipe.batch_transform or any_sharded(trial.model)
    mean = recipe.loss_over == "samples" and recipe.reduction == "mean" and not others
    shared = (world.world_size > 1 and not world.virtual_ranks) or settings.micro_batch_size
    rounds = 1e-4 if world.device.type == "cpu" and settings.precision in ("fp32", "fp64") else 1e-2
    most = max(2, min(settings.micro_batch_size or _SAMPLES, _SAMPLES))
    no_mean = of_shares(trial.model, train, loss, recipe, most, rounds) if mean and shared else ()
    trial.applied.train()
    buffers = of_buffers(trial.model, forward, _SAMPLES, world)
    return {**buffers, **of_forward(trial.model, recipe.forward, forward, _FEW), "no_mean": no_mean}


@contextlib.contextmanager
def _undisturbed(takes: nn.Module, model: nn.Module) -> Iterator[None]:
    """Leave a model that the ranks share out, and that is tried itself, as it was."""
    if not any_sharded(model):
        yield
        return
    put_back, counted = keep_buffers(model), [_plain(one) for one in model.modules()]
    try:
        yield
    finally:
        free_gathered(takes)
        for module, plain in zip(model.modules(), counted, strict=True):
            vars(module).update(plain)
        put_back()


def _plain(module: nn.Module) -> dict[str, Any]:
    """Return a module's public attributes of types that may hold a count."""
    kinds = (int, float, str, Tensor, type(None))
    return {n: v for n, v in vars(module).items() if n[0] != "_" and isinstance(v, kinds)}


def _names_of_losses(
    recipe: Recipe, trial: _Trial, targets: Any, forward: Callable[[], Any], *outputs: Any
) -> tuple[str, ...]:
    """Return the names of the losses of a training; other mistakes are reported later.

    They are looked for with `outputs`, if there are some, and then with those of a forward in
    training: a model may have what the loss takes, or be the loss, only then.
    """

    def in_training() -> Any:
        trial.applied.train()
        return forward()

    value = None
    loss = timed(trial.loss, Moment())
    for make in (*(lambda output=output: output for output in outputs), in_training):
        with contextlib.suppress(Exception):
            value = loss(make(), targets)
            if isinstance(value, Mapping | Tensor):
                break
    if not isinstance(value, Mapping):
        return ()
    parts = tuple(parts_of(total_of(value, recipe.loss_weights or {}, value, recipe.loss)))
    _check_names(recipe, Tried(recipe.metrics, parts))
    return parts


def _check_names(recipe: Recipe, tried: Tried) -> None:
    measured = tried.measured
    computed = {*tried.computed} - {*recipe.metrics}
    if any(getattr(metric, "gives_loss", False) for metric in recipe.metrics.values()):
        computed -= {"loss"}
    check_names("The recipe's metrics returned", computed, TAKEN_NAMES)
    parts = tuple(dict.fromkeys((*tried.parts, *tried.evaluation_parts)))
    taken = {*TAKEN_IN_STEPS, *recipe.metrics, *measured}
    check_names("The recipe's loss returned", parts, taken)
    taken = {*TAKEN_NAMES, *recipe.metrics}
    check_names("The recipe's evaluate_batch returned", measured, taken)
    if recipe.loss_weights and not parts:
        raise UserError(
            f"Recipe(loss_weights=…) takes a loss that returns a dict of losses; "
            f"loss(){defined_at(recipe.loss)} returned a scalar."
        )
    if measured:
        check_lower(recipe.lower_is_better, (*recipe.metrics, *parts, *measured))


def fitting_metrics(metrics: Metrics, targets: Any) -> Metrics:
    """Drop the default accuracy where targets are floats, not classes."""
    if not (isinstance(targets, Tensor) and targets.is_floating_point()):
        return metrics
    return {name: metric for name, metric in metrics.items() if metric is not accuracy}


def check_extra_state(model: nn.Module) -> None:
    """Check that a checkpoint can hold what `get_extra_state` of a module returns."""
    state = model.state_dict()
    for name in state:
        if not name.endswith("_extra_state"):
            continue
        if why := why_not_kept(state[name]):
            raise UserError(
                f"The recipe's model has {name}, a {type(state[name]).__name__} that a checkpoint "
                f"cannot hold: {why}. Return tensors, numbers, strings, and lists and dicts of "
                "them from get_extra_state()."
            )


def _check_labels(name: str, source: Source, outputs: Any, loss: object) -> None:
    """Check all targets in memory: a wrong one may come late, and unclear on a GPU."""
    classifies = loss is nn.functional.cross_entropy or type(loss) is nn.CrossEntropyLoss
    if not (classifies and isinstance(source, MemorySource) and isinstance(outputs, Tensor)):
        return
    targets = source.targets
    if outputs.dim() != 2 or targets.dim() != 1 or targets.is_floating_point():
        return
    num, ignored = outputs.shape[1], getattr(loss, "ignore_index", -100)
    wrong = ((targets < 0) | (targets >= num)) & (targets != ignored)
    if bool(wrong.any()):
        place = int(wrong.nonzero()[0])
        raise UserError(
            f"Target {int(targets[place])} of the {name} sample {place} is not a class: the "
            f"recipe's model has {num} outputs, so classes are 0 to {num - 1}. "
            f"{int(wrong.sum())} of {len(targets)} {name} targets are out of range."
        )


def _check_pairs(
    trial: Callable[[Any, Any], Tensor], outputs: Any, targets: Any, loss: object
) -> None:
    """Check that a loss compares each output with its own target, where their shapes differ.

    Outputs (batch, 1) minus targets (batch,) is (batch, batch): every output with every target.
    Such a loss stays the same when the targets are permuted.
    """
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor)):
        return
    turned = targets.roll(1, 0) if targets.dim() else targets
    if outputs.shape == targets.shape or outputs.numel() != targets.numel():
        return
    if torch.equal(turned, targets):
        return
    places = torch.arange(1.0, outputs.numel() + 1, device=outputs.device)
    spread = (0.5 + 0.4 * places.sin()).view(outputs.shape).to(outputs.dtype)
    try:
        first, other = float(trial(spread, targets)), float(trial(spread, turned))
        blank = float(trial(spread, torch.zeros_like(targets)))
    except Exception:
        return  # it fails by itself, or takes other outputs than these
    reads_targets = first != 0 and abs(first - blank) > 1e-6 * abs(first)
    if reads_targets and abs(first - other) <= 1e-6 * abs(first):
        raise UserError(
            f"The recipe's loss{defined_at(loss)} does not match targets to outputs one to one: "
            f"outputs are {tuple(outputs.shape)} and targets {tuple(targets.shape)}, so each "
            "output is compared with every target. Give both the same shape: targets.unsqueeze(1), "
            "or outputs.squeeze(1)."
        )
