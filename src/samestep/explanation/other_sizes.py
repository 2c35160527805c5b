"""The same settings on other numbers of ranks: what the training would be there."""

from dataclasses import dataclass

from samestep.errors import UserError
from samestep.session.build import planned
from samestep.session.request import Request
from samestep.training.plan import Plan


@dataclass(frozen=True, kw_only=True)
class OtherSize:
    """The plan on another number of ranks, as far as it decides on what is trained."""

    ranks: int
    refused: str = ""
    """Why it cannot be; then all that follows says nothing."""
    global_batch_size: int = 0
    micro_batch_size: int = 0
    accumulate: int = 0
    total_steps: int = 0
    lr: float = 0.0
    same: bool = False
    """Whether steps, samples per step and learning rate are those of the explained plan."""


def other_sizes(request: Request, plan: Plan) -> tuple[OtherSize, ...]:
    """Return the plans on one rank, half the ranks, the ranks themselves and twice as many."""
    ranks = plan.world_size
    sizes = sorted({1, max(1, ranks // 2), ranks, 2 * ranks})
    return tuple(_other(request, plan, size) for size in sizes)


def _other(request: Request, plan: Plan, ranks: int) -> OtherSize:
    try:
        other = planned(request, plan.num_samples, ranks)
    except UserError as error:
        return OtherSize(ranks=ranks, refused=str(error))
    return OtherSize(
        ranks=ranks,
        global_batch_size=other.global_batch_size,
        micro_batch_size=other.micro_batch_size,
        accumulate=other.accumulate,
        total_steps=other.total_steps,
        lr=other.lr,
        same=_trains(other) == _trains(plan),
    )


def _trains(plan: Plan) -> tuple[int, int, float]:
    return plan.global_batch_size, plan.total_steps, plan.lr
