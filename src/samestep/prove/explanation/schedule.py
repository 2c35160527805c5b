"""What follows from a plan: shares of a step, learning rates, evaluations, files kept."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby, product
from operator import attrgetter

from samestep.base.errors import UserError
from samestep.base.run.index import Entry, Index, Retention
from samestep.base.settings import Settings
from samestep.core.data.order import LazyOrder, group_steps, micro_steps, part_of
from samestep.core.plan import (
    ENDLESS,
    Plan,
    due_after_epoch,
    due_within_epoch,
    learning_rate,
    warmup_steps,
)
from samestep.core.session.build import Built, planned
from samestep.core.session.request import Request
from samestep.core.training.loop import checkpoint_name
from samestep.core.training.stopping import Watch
from samestep.core.training.work import Position
from samestep.launch.ranks.world import World

_MOST_EVENTS = 100_000


@dataclass(frozen=True, kw_only=True)
class Share:
    """What each of some consecutive ranks computes in a step: they have equal parts."""

    first_rank: int
    last_rank: int
    samples: int
    micro_steps: tuple[int, ...]
    """Samples of each; 0 for one that only keeps a rank with an empty share in step."""
    virtual_ranks: tuple[int, ...] = ()  # samples of each virtual rank that is computed here


@dataclass(frozen=True, kw_only=True)
class StepShares:
    """One step, shared out over all ranks."""

    samples: int
    shares: tuple[Share, ...]

    @property
    def most(self) -> int:
        """The most samples of a micro-step, on any rank."""
        return max(max(share.micro_steps, default=0) for share in self.shares)


def full_step(plan: Plan, settings: Settings, world: World) -> StepShares:
    """Return the shares of a step with a whole global batch."""
    samples = min(plan.global_batch_size, plan.num_samples or plan.global_batch_size)
    return _shared(samples, samples, 0, plan, settings, world)


def last_step(plan: Plan, settings: Settings, world: World) -> StepShares | None:
    """Return the shares of an epoch's last step if it is smaller than the others."""
    if plan.is_stream or plan.by_tokens or plan.total_steps < plan.steps_per_epoch:
        return None
    step = plan.steps_per_epoch - 1
    left = plan.num_samples - step * plan.global_batch_size
    if step == 0 or left >= plan.global_batch_size:
        return None
    return _shared(plan.num_samples, plan.global_batch_size, step, plan, settings, world)


def evaluation_shares(num_samples: int, world: World) -> tuple[int, int]:
    """Return the fewest and the most samples that a rank, or a virtual one, evaluates."""
    parts = [len(part_of(range(num_samples), part, world)) for part in (world.num_parts - 1, 0)]
    return min(parts), max(parts)


def _shared(
    num_samples: int, global_batch: int, step: int, plan: Plan, settings: Settings, world: World
) -> StepShares:
    """Share out one step of an epoch, as the data is cut in training."""
    order = LazyOrder(num_samples, lambda positions: positions)
    shares: list[Share] = []
    for rank in range(world.world_size):
        of_rank = replace(world, rank=rank)
        blocks = group_steps(order, step, 1, global_batch, of_rank, drop_last=settings.drop_last)
        parts = list(micro_steps(next(blocks), plan.cut, of_rank))
        counted = tuple(part.rows if part.weight else 0 for part in parts)
        virtual = tuple(
            sum(part.rows for part in of_virtual)
            for _, of_virtual in groupby(parts, key=lambda part: part.place)
            if world.virtual_ranks
        )
        share = Share(
            first_rank=rank,
            last_rank=rank,
            samples=sum(counted),
            micro_steps=counted,
            virtual_ranks=virtual,
        )
        if shares and share == replace(shares[-1], first_rank=rank, last_rank=rank):
            shares[-1] = replace(shares[-1], last_rank=rank)
        else:
            shares.append(share)
    samples = min(global_batch, num_samples - step * global_batch)
    return StepShares(samples=samples, shares=tuple(shares))


@dataclass(frozen=True, kw_only=True)
class Rate:
    """The learning rate of one step."""

    step: int  # counted from 1
    lr: float
    what: str  # why this step is shown, in a word or two


def rates(plan: Plan, settings: Settings, built: Built) -> tuple[Rate, ...]:
    """Return the rates at the first, the next, half-way and last step, and after the warm-up.

    Only the next is known of a scheduler of PyTorch, and of what depends on a validation.
    """
    taken, scheduler = built.state.position.step, built.work.learner.scheduler
    if scheduler is not None or "metrics" in plan.schedule_asks:
        lr = learning_rate(plan, settings, taken, built.state.validated)
        lr = lr if scheduler is None else scheduler.next_lr
        return (Rate(step=taken + 1, lr=lr, what="next step" if taken else "first step"),)
    named = {0: "first step"}
    if warmup := warmup_steps(plan, settings):
        named[warmup] = "after the warm-up"
    if taken > 0:
        named[taken] = "next step"
    if plan.total_steps < ENDLESS:
        named.setdefault(plan.total_steps // 2, "half-way")
        named.setdefault(plan.total_steps - 1, "last step")
    return tuple(
        Rate(step=step + 1, lr=learning_rate(plan, settings, step), what=named[step])
        for step in sorted(named)
        if step < plan.total_steps
    )


@dataclass(frozen=True, kw_only=True)
class PlannedEvent:
    """A step after which the training evaluates, saves, or both. Steps and epochs count from 1."""

    step: int
    epoch: int
    evaluates: bool
    saves: str  # the checkpoint's file name, or empty


@dataclass(frozen=True, kw_only=True)
class KeptFiles:
    """The number of checkpoint files at the end of the training."""

    fewest: int
    most: int


def planned_events(
    plan: Plan, settings: Settings, position: Position, *, evaluates: bool
) -> tuple[PlannedEvent, ...] | None:
    """Return all evaluations and checkpoints to come; None for a stream, or if there are too many.

    `evaluates`: whether there is validation data. Early stopping and signals are not foreseen.
    """
    every = [e for e in (settings.eval_every_steps, settings.checkpoint_every_steps) if e]
    most = plan.epochs + sum(plan.total_steps // each for each in every)
    if plan.is_stream or most > _MOST_EVENTS:
        return None
    events = _events(plan, settings, position, every)
    due = (replace(event, evaluates=event.evaluates and evaluates) for event in events)
    return tuple(event for event in due if event.evaluates or event.saves)


def _events(
    plan: Plan, settings: Settings, start: Position, every: list[int]
) -> Iterator[PlannedEvent]:
    def name(epoch: int, step: int, step_in_epoch: int) -> str:
        return checkpoint_name(Position(epoch=epoch, step=step, step_in_epoch=step_in_epoch))

    for epoch in range(start.epoch, plan.epochs):
        begin = epoch * plan.steps_per_epoch
        end = min(begin + plan.steps_per_epoch, plan.total_steps)
        after = max(start.step, begin)
        full = end - begin == plan.steps_per_epoch
        if end < start.step or (end == start.step and not full):
            continue  # it is trained already
        for step in sorted({s for e in every for s in range(after - after % e + e, end, e)}):
            due = due_within_epoch(settings, step)
            saves = name(epoch, step, step - begin) if due.saves else ""
            yield PlannedEvent(step=step, epoch=epoch + 1, evaluates=due.evaluates, saves=saves)
        due = due_after_epoch(settings, epoch + 1, end, last=end == plan.total_steps)
        saves = name(epoch + full, end, 0 if full else end - begin) if due.saves else ""
        yield PlannedEvent(step=end, epoch=epoch + 1, evaluates=due.evaluates, saves=saves)


def saves_the_best(settings: Settings, events: Iterable[PlannedEvent]) -> bool:
    """Whether early stopping may save more than is planned: whatever is the best so far."""
    if settings.patience is None:
        return False
    return any(event.evaluates and not event.saves for event in events)


def kept_files(events: tuple[PlannedEvent, ...], rules: Retention, before: Index) -> KeptFiles:
    """Return how many checkpoints are kept, whatever the metric does.

    The fewest are kept if the last is among the best, the most if each is worse than the one
    before; with a rule by age, if all are older, and if none is. `before` are those that a run has
    already.
    """
    saved = [event for event in events if event.saves]
    if rules.keeps_all:
        steps = {entry.step for entry in before.checkpoints} | {event.step for event in saved}
        return KeptFiles(fewest=len(steps), most=len(steps))
    counts = []
    ages = (0.0, math.inf) if rules.hours is not None else (0.0,)  # all young, or all old
    for sign, now in product((1, -1), ages):
        index = replace(before, mode="max")
        for event in saved:
            metric = float(sign * event.step) if event.evaluates else None
            entry = Entry(
                path=event.saves,
                step=event.step,
                epoch=event.epoch,
                sha256="",
                metric=metric,
                time=0.0,
            )
            index = index.add(entry).prune(rules, now=now)
        counts.append(len(index.checkpoints))
    return KeptFiles(fewest=min(counts), most=max(counts))


def first_stop(
    patience: int | None, events: tuple[PlannedEvent, ...], watch: Watch
) -> PlannedEvent | None:
    """Return the first evaluation after which --patience can stop the training.

    `watch` is the monitored metric so far; no later evaluation improves on it.
    """
    if patience is None:
        return None
    for event in events:
        if event.evaluates:
            # The very first evaluation is an improvement, whatever it gives.
            worse = 0.0 if watch.reference is None else math.nan
            watch = watch.after(worse, event.epoch, 0.0)
            if watch.evaluations_since >= patience:
                return event
    return None


@dataclass(frozen=True, kw_only=True)
class OtherSize:
    """The same settings on another number of ranks."""

    ranks: int
    refused: str = ""  # why it cannot be; then the other fields are empty
    global_batch_size: int = 0
    micro_batch_size: int = 0
    accumulate: int = 0
    total_steps: int = 0
    lr: float = 0.0
    same: bool = False
    """Whether steps, samples per step and learning rate are those of the explained plan."""


def other_sizes(request: Request, plan: Plan) -> tuple[OtherSize, ...]:
    """Return the plans on one rank, half the ranks, the ranks themselves and twice as many."""
    decisive = attrgetter("global_batch_size", "total_steps", "lr")
    shown = ("global_batch_size", "micro_batch_size", "accumulate", "total_steps", "lr")
    sizes = []
    for ranks in sorted({1, max(1, plan.world_size // 2), plan.world_size, 2 * plan.world_size}):
        try:
            other = planned(request, plan, ranks)
        except UserError as error:
            sizes.append(OtherSize(ranks=ranks, refused=str(error)))
            continue
        same = decisive(other) == decisive(plan)
        numbers = {name: getattr(other, name) for name in shown}
        sizes.append(OtherSize(ranks=ranks, same=same, **numbers))
    return tuple(sizes)
