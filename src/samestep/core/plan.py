"""What follows from settings, data and world: batch sizes, steps, when things are due, rates."""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, NamedTuple, Self

from samestep.base.errors import UserError, blame, defined_at
from samestep.base.settings import Settings, flag_name
from samestep.core.data.order import Cut, TokenCut, cut_rows, share, steps_per_epoch
from samestep.core.recipe_checks import schedule_asks


class Due(NamedTuple):
    """What falls due after a step or an epoch."""

    evaluates: bool
    saves: bool


def due_within_epoch(settings: Settings, step: int) -> Due:
    """Return whether to evaluate and save after a step (from 1) that does not end its epoch."""
    return Due(_due(settings.eval_every_steps, step), _due(settings.checkpoint_every_steps, step))


def due_after_epoch(settings: Settings, epoch: int, step: int, *, last: bool) -> Due:
    """Return whether to evaluate and save after an epoch (from 1); `last`: training ends there."""
    within = due_within_epoch(settings, step)
    return Due(
        last or _due(settings.eval_every_epochs, epoch) or within.evaluates,
        last or _due(settings.checkpoint_every_epochs, epoch) or within.saves,
    )


def steps_between_records(total_steps: int) -> int:
    """Return the default number of steps between two `step` records."""
    return next((steps for steps in (50, 20, 10, 5, 2) if total_steps >= 200 * steps), 1)


def is_recorded(step: int, log_every: int | None) -> bool:
    """Whether a step, counted from 1, has a record of its own.

    Without `log_every`, for a stream of unknown length, as if the stream ended at each step.
    """
    return step % (log_every or steps_between_records(step)) == 0


def _due(every: int | None, count: int) -> bool:
    return every is not None and count % every == 0


_LARGEST = 2**31

ENDLESS = 2**40
"""The number of steps where the end is unknown: of a stream, or in `rehearse`."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The numbers of a run that are derived from its settings, data and world."""

    world_size: int
    virtual_ranks: int | None = None
    """Fixed shares of each global batch; None: each rank has one."""
    num_samples: int
    """Samples of the training set; 0 for a stream, whose length is unknown."""
    global_batch_size: int
    micro_batch_size: int
    """Most samples per micro-step, of a rank or of a virtual one."""
    accumulate: int
    """Most micro-steps per step, of a rank or of a virtual one."""
    together: bool = False
    """Whether forwards talk to those of the other ranks: each rank needs equally many of them."""
    steps_per_epoch: int
    """Of a stream `ENDLESS`: it says itself when it ends."""
    epochs: int
    """Passes over the data, the last one perhaps cut short by --max-steps; 0 if only that counts
    them."""
    total_steps: int
    log_every: int | None
    """Steps between two `step` records; None for a stream of unknown length."""
    lr: float
    """After scaling."""
    by_tokens: TokenCut | None = None
    """How --batch-tokens cuts samples into steps; batch sizes are then those of the largest."""
    schedule: Callable[..., Any] | None = None
    """The recipe's own: (step, total steps) → factor, or (optimizer, plan) → scheduler."""
    schedule_asks: tuple[str, ...] = ()
    """What it asks for by name."""

    @property
    def makes_scheduler(self) -> bool:
        """Whether the recipe's schedule makes a scheduler of PyTorch."""
        return "optimizer" in self.schedule_asks

    @property
    def is_stream(self) -> bool:
        """Whether the training set is a stream."""
        return self.num_samples == 0

    @property
    def evaluated_at_once(self) -> int:
        """Samples of a forward that fit, whatever their length: those of a micro-step."""
        if self.by_tokens is None:
            return self.micro_batch_size
        return max(1, self.by_tokens.fits // self._micro_steps)

    @property
    def _micro_steps(self) -> int:
        """Most micro-steps of a step, of all ranks or virtual ones."""
        return self.accumulate * (self.virtual_ranks or self.world_size)

    def full_micro_steps(self) -> frozenset[int]:
        """Return the sizes of micro-steps in a step with a whole global batch, of any rank."""
        samples = min(self.global_batch_size, self.num_samples or self.global_batch_size)
        return self.micro_steps_of(samples)

    def micro_steps_of(self, samples: int) -> frozenset[int]:
        """Return the sizes of micro-steps in a step of some samples, of any rank."""
        parts = self.virtual_ranks or self.world_size
        cuts = (self.cut(len(share(range(samples), p, parts)), samples) for p in (0, parts - 1))
        return frozenset(rows for cut in cuts for _, rows, _ in cut)

    def record(self) -> dict[str, Any]:
        """Return the plan as records hold it; what is unknown is None."""
        table = asdict(replace(self, schedule=None, by_tokens=None))
        del (table["schedule"], table["schedule_asks"], table["by_tokens"], table["together"])
        if self.virtual_ranks is None:
            del table["virtual_ranks"]
        if self.is_stream:
            table |= dict.fromkeys(("num_samples", "steps_per_epoch"))
            table |= {"epochs": self.epochs or None}
            table |= {"total_steps": self.total_steps if self.total_steps < ENDLESS else None}
        return table

    @cached_property
    def cut(self) -> Cut:
        """How a step's rows become micro-steps."""
        ranks: dict[str, Any] = {"world_size": self.world_size, "together": self.together}
        if self.by_tokens is None:
            return partial(cut_rows, batch_size=self.micro_batch_size, **ranks)
        parts = self._micro_steps  # of a few long samples, too
        return lambda rows, size: cut_rows(rows, size, batch_size=-(-size // parts), **ranks)


def make_plan(
    settings: Settings,
    num_samples: int,
    world_size: int,
    *,
    schedule: Callable[..., Any] | None = None,
    by_tokens: TokenCut | None = None,
) -> Plan:
    """Derive a run's numbers from its settings; a stream has 0 samples.

    The global batch is the same on any number of ranks, whose shares differ by one sample at most.
    With --batch-tokens, `by_tokens` says how the samples are cut.
    """
    check_virtual(settings, num_samples, world_size)
    if 0 < num_samples < world_size:
        raise UserError(
            f"{world_size} ranks are more than the {num_samples} training samples: every rank "
            f"needs one. Start at most {num_samples} ranks."
        )
    parts = settings.virtual_ranks or world_size
    ranks = "virtual ranks" if settings.virtual_ranks else "ranks"
    global_batch, micro_batch, accumulate = batch_sizes(settings, parts, ranks, by_tokens)
    if settings.static_graph and accumulate > 1 and world_size > 1:
        raise UserError(
            f"--static-graph does not go with {accumulate} micro-steps per step: DDP learns the "
            "graph in its first backward, which then sends nothing. Leave it out, or take all "
            "samples of a rank at once."
        )
    if global_batch >= _LARGEST:
        raise UserError(
            f"The global batch of {global_batch} samples is too large to count; it must be below "
            f"{_LARGEST}."
        )
    if num_samples == 0:
        _check_stream(settings, world_size, schedule)
    per_epoch = ENDLESS
    if by_tokens is not None:
        per_epoch = len(by_tokens.sizes)
    elif num_samples > 0:
        per_epoch = _steps_per_epoch(settings, num_samples, global_batch)
    epochs, total = _length(settings, per_epoch)
    plan = Plan(
        world_size=world_size,
        virtual_ranks=settings.virtual_ranks,
        num_samples=num_samples,
        global_batch_size=global_batch,
        micro_batch_size=micro_batch,
        accumulate=accumulate,
        together=settings.forwards_together and world_size > 1,
        steps_per_epoch=per_epoch,
        epochs=epochs,
        total_steps=total,
        log_every=settings.log_every or (steps_between_records(total) if total < ENDLESS else None),
        lr=scaled_lr(settings, global_batch),
        schedule=schedule,
        by_tokens=by_tokens,
        schedule_asks=() if schedule is None else schedule_asks(schedule),
    )
    if schedule is not None:
        _check_schedule(plan, settings)
    return plan


def _steps_per_epoch(settings: Settings, num_samples: int, global_batch: int) -> int:
    """Return the steps of an epoch, once there is one and each has its samples."""
    if settings.order == "columns" and num_samples < global_batch:
        raise UserError(
            f"--order columns: {num_samples} training samples do not make {global_batch} columns, "
            f"one for each slot of a step. Use --batch-size {num_samples} or less."
        )
    per_epoch = steps_per_epoch(num_samples, global_batch, drop_last=settings.drop_last)
    if per_epoch == 0:
        raise UserError(
            f"--drop-last leaves no step: {num_samples} training samples are fewer than the "
            f"global batch of {global_batch}. Use a smaller batch or leave out --drop-last."
        )
    return per_epoch


def check_virtual(settings: Settings, num_samples: int, world_size: int) -> None:
    """Check that there are enough virtual ranks for all ranks, and samples for both."""
    virtual = settings.virtual_ranks
    if virtual is None:
        return
    if world_size > virtual:
        raise UserError(
            f"--virtual-ranks {virtual} is less than the {world_size} ranks: each rank computes "
            f"one or more virtual ranks. Start at most {virtual} ranks, or begin a new run with "
            "more virtual ranks."
        )
    if num_samples == 0:
        raise UserError(
            "--virtual-ranks takes no stream: who reads which element depends on the number of "
            "ranks. Leave it out, or give a map-style Dataset."
        )
    if num_samples < virtual:
        raise UserError(
            f"--virtual-ranks {virtual} is more than the {num_samples} training samples: each "
            f"virtual rank needs a sample. Use at most {num_samples}."
        )


def _check_schedule(plan: Plan, settings: Settings) -> None:
    """Check that nothing else sets the rates, and the factors of a few steps."""
    place = defined_at(plan.schedule)
    if settings.schedule != "constant":
        problem = f"--schedule {settings.schedule}: the recipe has a schedule of its own{place}."
        raise UserError(f"{problem} Leave one of them out.")
    if plan.makes_scheduler:
        if settings.warmup_steps:
            raise UserError(
                f"--warmup-steps {settings.warmup_steps}: the recipe's scheduler{place} sets the "
                "learning rates by itself. Leave the setting out, and let a scheduler warm up: "
                "SequentialLR of LinearLR and yours."
            )
        return
    if plan.is_stream and (asked := {"epoch", "steps_per_epoch"} & {*plan.schedule_asks}):
        raise UserError(
            f"The recipe's schedule{place} asks for {' and '.join(sorted(asked))}, and the length "
            "of a stream is unknown. Use the step and the total."
        )
    # What it returns once there are metrics shows in the run.
    total, early = plan.total_steps, "metrics" in plan.schedule_asks
    for step in (0,) if early else (0, total // 2, total - 1):
        factors = _factors(plan, step, {})
    if factors != _factors(plan, step, {}):
        problem = f"The recipe's schedule{place} returned two rates for the same step, {step}"
        raise UserError(f"{problem}: a resume would be another training. Let only the step decide.")


def _factors(plan: Plan, step: int, metrics: Mapping[str, float]) -> list[float]:
    """Return the schedule's factor, or that of each group, once they are numbers of 0 or more."""
    schedule, total, per_epoch = plan.schedule, plan.total_steps, plan.steps_per_epoch
    assert schedule is not None
    arguments: dict[str, Any] = {}
    if plan.schedule_asks:
        facts = {"epoch": step // per_epoch, "steps_per_epoch": per_epoch, "metrics": {**metrics}}
        arguments = {name: facts[name] for name in plan.schedule_asks}
    try:
        result = schedule(step, total, **arguments)
    except Exception as error:
        remedy = "It is called with (step, total steps); to make a scheduler, name `optimizer`."
        if "metrics" in arguments:
            remedy = "Before the first validation `metrics` is empty."
        message = f"The recipe's schedule failed at step {step} of {total}"
        blame(message, error, schedule, remedy=remedy)
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        factors = [float(one) for one in (result if isinstance(result, list | tuple) else [result])]
        if factors and all(0 <= factor < math.inf for factor in factors):
            return factors
    raise UserError(
        f"The recipe's schedule{defined_at(schedule)} returned {result!r:.80} at step {step} of "
        f"{total}; it must be a number of 0 or more, which the learning rate is multiplied by, or "
        "a list with one for each group of the optimizer."
    )


def _length(settings: Settings, per_epoch: int) -> tuple[int, int]:
    if settings.epochs is None and settings.max_steps is None:
        raise UserError("How long to train? Give --epochs or --max-steps.")
    by_epochs = None if settings.epochs is None else settings.epochs * per_epoch
    total = min(limit for limit in (by_epochs, settings.max_steps) if limit is not None)
    if per_epoch == ENDLESS:
        return settings.epochs or 0, min(total, ENDLESS)
    return -(-total // per_epoch), total


def _check_stream(settings: Settings, world_size: int, schedule: Callable[..., Any] | None) -> None:
    """Check that no setting needs the length of a stream, or excludes streams."""
    if settings.order != "shuffled" or settings.group_by_length:
        flag = "group-by-length" if settings.group_by_length else f"order {settings.order}"
        raise UserError(
            f"--{flag} takes no stream: its elements come in an order of their "
            "own, or shuffled by --shuffle-buffer. Leave it out, or give a map-style Dataset."
        )
    if settings.engine != "native":
        raise UserError(
            f"--engine {settings.engine} takes no stream: it asks for the length of an epoch. "
            "Leave it out, or give a map-style Dataset."
        )
    if settings.sync_batchnorm and world_size > 1:
        raise UserError(
            "--sync-batchnorm does not go with a stream: near its end ranks may have no elements. "
            "Leave it out, or use layers that do not look at the batch."
        )
    part = 0 < settings.warmup_steps < 1
    if settings.max_steps is None and (schedule or part or settings.schedule != "constant"):
        name = f"--schedule {settings.schedule}" if schedule is None else "The recipe's schedule"
        name = f"--warmup-steps {settings.warmup_steps}" if part else name
        raise UserError(
            f"{name} needs the number of steps, and the length of a stream is unknown. Give "
            "--max-steps, or leave it out."
        )


_NOT_BY_TOKENS = {
    "batch_size": "both are the size of a step",
    "batch_size_per_rank": "both are the size of a step",
    "micro_batch_size": "micro-steps are of tokens, too, and --accumulate is their number",
    "drop_last": "no batch is incomplete",
    "order": "samples of similar length are shuffled by whole batches",
    "group_by_length": "its batches are of similar length already",
    "lr_scaling": "the number of samples differs from step to step",
    "compile": "each batch has another shape, and would be compiled for itself",
    "engine": "Lightning counts equal batches",
}


def batch_sizes(
    settings: Settings, parts: int, ranks: str, by_tokens: TokenCut | None
) -> tuple[int, int, int]:
    """Return global batch, micro-batch and micro-steps; `ranks` is the word for messages."""
    if settings.batch_tokens is not None:
        for name, why in _NOT_BY_TOKENS.items():
            value = getattr(settings, name)
            if value != Settings.__dataclass_fields__[name].default:
                typed = flag_name(name) + ("" if value is True else f" {value}")
                raise UserError(
                    f"--{typed} does not go with --batch-tokens {settings.batch_tokens}: {why}. "
                    "Leave one of them out."
                )
        if by_tokens is None:
            raise UserError(
                f"--batch-tokens {settings.batch_tokens} takes a map-style Dataset or tensors, and "
                "samestep's own loop. Use --batch-size."
            )
        largest, accumulate = max(by_tokens.sizes), settings.accumulate or 1
        return largest, -(-largest // (parts * accumulate)), accumulate
    total, asked = settings.batch_size, settings.accumulate
    if settings.batch_size_per_rank is not None:
        if total is not None:
            raise UserError(
                f"--batch-size {total} and --batch-size-per-rank {settings.batch_size_per_rank}: "
                "one says what all ranks take together, the other what each takes. Leave one out."
            )
        total = settings.batch_size_per_rank * parts
    if total is None:
        raise UserError("No batch size: give --batch-size, the samples of a step over all ranks.")
    if total < parts:
        raise UserError(
            f"--batch-size {total} is less than the {parts} {ranks}: each needs a sample of every "
            f"step. Use at most {total} {ranks}, or --batch-size {parts} or more."
        )
    largest = -(-total // parts)
    micro_batch = min(settings.micro_batch_size or -(-largest // (asked or 1)), largest)
    accumulate = -(-largest // micro_batch)
    if settings.micro_batch_size is not None and asked not in (None, accumulate):
        raise UserError(
            f"--batch-size {total} on {parts} {ranks} with --micro-batch-size "
            f"{settings.micro_batch_size} is --accumulate {accumulate}, but --accumulate is "
            f"{asked}. Leave one of the two out."
        )
    return total, micro_batch, accumulate


def scaled_lr(settings: Settings, global_batch: int) -> float:
    """Return the learning rate for a global batch.

    Linear scaling is Goyal et al. (2017), "Accurate, large minibatch SGD"; the square root is
    Krizhevsky (2014), "One weird trick for parallelizing convolutional neural networks".
    """
    if settings.lr_scaling == "none" or settings.base_batch_size is None:
        return settings.lr
    ratio = global_batch / settings.base_batch_size
    return settings.lr * (ratio if settings.lr_scaling == "linear" else math.sqrt(ratio))


class GroupRates(float):
    """The learning rates of an optimizer's groups; as a number, the first of them."""

    each: tuple[float, ...]

    def __new__(cls, each: Sequence[float]) -> Self:
        """Take the rate of each group, before its ratio to --lr."""
        rates = super().__new__(cls, each[0])
        rates.each = tuple(each)
        return rates


def warmup_steps(plan: Plan, settings: Settings) -> int:
    """Return the steps of the warm-up; a fraction is rounded up, as Hugging Face's Trainer does."""
    wanted = settings.warmup_steps
    return int(wanted) if wanted >= 1 else math.ceil(wanted * plan.total_steps)


def learning_rate(
    plan: Plan, settings: Settings, step: int, metrics: Mapping[str, float] = MappingProxyType({})
) -> float:
    """Return the learning rate of a step, counted from 0, after a validation with these metrics.

    The warm-up's ramp is linear and reaches the full rate in the step after it. The rate then falls
    to --lr-end: as a cosine (Loshchilov & Hutter 2017, without restarts), or as a power of what is
    left. A scheduler of PyTorch begins at the rate returned, and sets the others itself.
    """
    warmup = warmup_steps(plan, settings)
    ramp, first = 1.0, settings.warmup_from
    if step < warmup:
        ramp = (step + 1) / (warmup + 1) if first is None else first + (1 - first) * step / warmup
    if plan.schedule is not None and not plan.makes_scheduler:
        # A checkpoint at the end, and a profile of more steps, ask for one that is never trained.
        trained = min(step, plan.total_steps - 1)
        rates = [plan.lr * ramp * factor for factor in _factors(plan, trained, metrics)]
        return rates[0] if len(rates) == 1 else GroupRates(rates)
    if step < warmup:
        return plan.lr * ramp
    if settings.schedule == "constant":
        return plan.lr
    progress = min(1.0, (step - warmup) / max(1, plan.total_steps - warmup))
    if settings.schedule == "cosine":
        left = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        left = (1.0 - progress) ** settings.lr_power  # 1 if it is linear
    end = plan.lr * (settings.lr_end / settings.lr)
    return end + (plan.lr - end) * left
