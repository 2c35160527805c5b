"""Who computes which part of a step: the shares of all ranks, as the data is cut in training."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from samestep.data.blocks import Block, group_steps, micro_steps, part_of
from samestep.ranks.world import World
from samestep.settings import Settings
from samestep.training.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Share:
    """What consecutive ranks that have equal parts of a step compute, each of them."""

    first_rank: int
    last_rank: int
    samples: int
    micro_steps: tuple[int, ...]
    """Samples of each; one that only stands in for an empty share has 0."""
    virtual_ranks: tuple[int, ...] = ()
    """Samples of each virtual rank that is computed here."""


@dataclass(frozen=True, kw_only=True)
class StepShares:
    """One step, shared out over all ranks."""

    samples: int
    shares: tuple[Share, ...]

    @property
    def even(self) -> bool:
        """Whether every rank computes the same number of samples."""
        return len({share.samples for share in self.shares}) == 1

    @property
    def most(self) -> int:
        """The most samples of a micro-step, on any rank."""
        return max(max(share.micro_steps, default=0) for share in self.shares)


def full_step(plan: Plan, settings: Settings, world: World) -> StepShares:
    """Return the shares of a step with a whole global batch."""
    samples = plan.global_batch_size
    if 0 < plan.num_samples < samples:
        samples = plan.num_samples
    return _shared(samples, samples, 0, plan, settings, world)


def last_step(plan: Plan, settings: Settings, world: World) -> StepShares | None:
    """Return the shares of an epoch's last step; None where it is like the others, or not known."""
    if plan.is_stream or plan.total_steps < plan.steps_per_epoch:
        return None
    step = plan.steps_per_epoch - 1
    left = plan.num_samples - step * plan.global_batch_size
    if step == 0 or left >= plan.global_batch_size:
        return None
    return _shared(plan.num_samples, plan.global_batch_size, step, plan, settings, world)


def evaluation_shares(num_samples: int, world: World) -> tuple[int, int]:
    """Return the fewest and the most samples that a share of an evaluation has."""
    whole = range(num_samples)
    parts = [len(part_of(whole, part, world)) for part in (world.num_parts - 1, 0)]
    return min(parts), max(parts)


def _shared(
    num_samples: int, global_batch: int, step: int, plan: Plan, settings: Settings, world: World
) -> StepShares:
    """Share out one step of an epoch of so many samples."""
    order = torch.arange(num_samples)
    found = []
    for rank in range(world.world_size):
        own = replace(world, rank=rank)
        blocks = group_steps(order, step, 1, global_batch, own, drop_last=settings.drop_last)
        found.append((rank, _share(next(blocks), plan, settings, own)))
    samples = min(global_batch, num_samples - step * global_batch)
    return StepShares(samples=samples, shares=tuple(_grouped(found)))


def _share(block: Block, plan: Plan, settings: Settings, world: World) -> Share:
    parts = list(micro_steps(block, plan.cut(settings), world))
    counted = [part.rows if part.weight else 0 for part in parts]
    virtual = [
        sum(part.rows for part in same)
        for _, same in groupby(parts, key=lambda part: part.place)
        if world.virtual_ranks
    ]
    return Share(
        first_rank=world.rank,
        last_rank=world.rank,
        samples=sum(counted),
        micro_steps=tuple(counted),
        virtual_ranks=tuple(virtual),
    )


def _grouped(found: list[tuple[int, Share]]) -> Iterator[Share]:
    """Yield consecutive ranks with equal shares as one."""

    def without_rank(pair: tuple[int, Share]) -> Share:
        return replace(pair[1], first_rank=0, last_rank=0)

    for share, same in groupby(found, key=without_rank):
        ranks = [rank for rank, _ in same]
        yield replace(share, first_rank=ranks[0], last_rank=ranks[-1])
