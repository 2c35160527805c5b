"""Where a training runs, its steps, its length and its learning rate, in words."""

from collections.abc import Iterator

from samestep.explanation.explain import Explanation
from samestep.explanation.shares import Share, StepShares
from samestep.reporting.words import count
from samestep.training.plan import ENDLESS

_SHOWN = 4
"""Groups of ranks that are shown, and parts of a sum."""


def where_rows(told: Explanation) -> Iterator[tuple[str, str]]:
    """Yield the ranks, their device, the run, and from where it goes on."""
    world, settings = told.world, told.settings
    nodes = ""
    if world.num_nodes > 1:
        nodes = f" = {count(world.num_nodes, 'node')} × {world.local_world_size} ranks per node"
    yield "ranks", f"{world.world_size:,}{nodes}; each is a process with all of the model"
    if told.plan.virtual_ranks:
        virtual = count(told.plan.virtual_ranks, "virtual rank")
        yield "shares", f"{virtual}: fixed shares of each step, whatever the number of ranks"
    connected = f", connected by {world.backend}" if world.world_size > 1 else ""
    yield "device", f"{told.device}{connected}, {settings.precision}"
    yield "run", told.run or f"a new directory, runs/{told.recipe}-…"
    if told.goes_on is None:
        return
    at = told.goes_on
    before = f" It was trained on {count(at.ranks_before, 'rank')}." if at.ranks_before else ""
    if not at.checkpoint:
        yield "goes on", f"from its beginning: there is no checkpoint yet.{before}"
        return
    left = ""
    if told.plan.total_steps < ENDLESS:
        left = f"; {max(0, told.plan.total_steps - at.step):,} steps are left"
    yield "goes on", f"from {at.checkpoint}, step {at.step:,}{left}.{before}"
    for problem in at.problems:
        yield "passed over", problem
    for change in at.changes:
        yield "changed", change


def step_rows(told: Explanation) -> Iterator[tuple[str, str]]:
    """Yield how a global batch is shared out."""
    plan = told.plan
    parts = count(plan.virtual_ranks or plan.world_size, "rank")
    parts = parts.replace("rank", "virtual rank") if plan.virtual_ranks else parts
    even = plan.micro_batch_size * (plan.virtual_ranks or plan.world_size) * plan.accumulate
    most = "" if even == plan.global_batch_size else "at most "
    text = (
        f"{plan.global_batch_size:,} per step = {most}{plan.micro_batch_size:,} × {parts} × "
        f"{count(plan.accumulate, 'micro-step')}"
    )
    yield "samples", text
    yield from _shares(told.step)
    if plan.accumulate > 1:
        text = (
            "A rank computes its samples in portions and adds up the gradients: less memory, "
            "the same step."
        )
        yield "micro-steps", text
    if plan.world_size > 1:
        text = (
            "All ranks average their gradients, weighted by their samples, and take the same "
            "optimizer step."
        )
        yield "then", text


def _shares(step: StepShares) -> Iterator[tuple[str, str]]:
    for number, share in enumerate(step.shares[:_SHOWN]):
        yield _ranks_of(share, alone=len(step.shares) == 1), _share(share)
        if number == _SHOWN - 1 and len(step.shares) > _SHOWN:
            yield "…", f"{len(step.shares) - _SHOWN} more groups; --json has all"


def _ranks_of(share: Share, *, alone: bool) -> str:
    if alone:
        return "each rank"
    first, last = share.first_rank, share.last_rank
    return f"rank {first}" if first == last else f"ranks {first}-{last}"


def _share(share: Share) -> str:
    if not share.samples:
        return "none: it stands in with samples of others, which do not count"
    text = count(share.samples, "sample")
    if share.virtual_ranks:
        text += (
            f" = {_sum(share.virtual_ranks)} of {count(len(share.virtual_ranks), 'virtual rank')}"
        )
    elif len(share.micro_steps) > 1:
        text += f" = {_sum(share.micro_steps)}"
    if share.virtual_ranks and share.micro_steps != share.virtual_ranks:
        text += f", in micro-steps of {max(share.micro_steps)} at most"
    return text


def _sum(numbers: tuple[int, ...]) -> str:
    """Return equal numbers as a product, others as a sum of their first few."""
    if len(set(numbers)) == 1:
        return f"{len(numbers)} × {numbers[0]}" if len(numbers) > 1 else f"{numbers[0]}"
    shown = " + ".join(map(str, numbers[:_SHOWN]))
    return shown + (" + …" if len(numbers) > _SHOWN else "")


def length_rows(told: Explanation) -> Iterator[tuple[str, str]]:
    """Yield the steps of an epoch and of the training, and an epoch's last step."""
    plan, settings = told.plan, told.settings
    if plan.is_stream:
        yield "epoch", "a stream: it says itself when it ends, so its length is not known"
        if plan.total_steps < ENDLESS:
            yield "training", f"at most {plan.total_steps:,} steps (--max-steps)"
        if plan.epochs:
            yield "training", f"{count(plan.epochs, 'epoch')}"
        return
    per_epoch, samples, batch = plan.steps_per_epoch, plan.num_samples, plan.global_batch_size
    how = "floor" if settings.drop_last else "ceil"
    yield "epoch", f"{count(per_epoch, 'step')} = {how}({samples:,} samples / {batch:,})"
    left = samples - per_epoch * batch
    if left > 0:
        yield (
            "left out",
            f"{count(left, 'sample')} of each epoch, other ones each time (--drop-last)",
        )
    if plan.total_steps == plan.epochs * per_epoch:
        epochs = f"{count(plan.epochs, 'epoch')} × {per_epoch:,}"
        yield "training", f"{count(plan.total_steps, 'step')} = {epochs}"
    else:
        text = (
            f"{count(plan.total_steps, 'step')} (--max-steps) = "
            f"{plan.total_steps / per_epoch:.4g} epochs of {per_epoch:,}"
        )
        yield "training", text
    if told.last_step is not None:
        few = told.last_step
        each = f", {few.shares[0].samples} per rank" if len(few.shares) == 1 else ""
        text = (
            f"{count(few.samples, 'sample')} at the end of an epoch = {samples:,} - "
            f"{per_epoch - 1:,} × {batch:,}{each}; each counts as much as any other"
        )
        yield "last step", text
        yield from _shares(few) if len(few.shares) > 1 else ()


def rates_rows(told: Explanation) -> Iterator[tuple[str, str]]:
    """Yield the learning rate after scaling, and at a few steps."""
    plan, settings = told.plan, told.settings
    base = settings.base_batch_size
    if settings.lr_scaling == "none":
        yield "lr", f"{plan.lr:.6g} (--lr), whatever the global batch: --lr-scaling is none"
    else:
        root = "square root of " if settings.lr_scaling == "sqrt" else ""
        text = (
            f"{plan.lr:.6g} = {settings.lr:.6g} × {plan.lr / settings.lr:.4g} "
            f"({settings.lr_scaling} scaling: {root}{plan.global_batch_size:,} samples per step "
            f"/ {base:,} that --lr was tuned for)"
        )
        yield "lr", text
    own = "the recipe's own" if plan.schedule is not None else settings.schedule
    ramp = (
        f"{count(settings.warmup_steps, 'step')} of warm-up, then " if settings.warmup_steps else ""
    )
    longer = settings.warmup_steps >= plan.total_steps
    yield "schedule", f"{ramp}{own}{': it ends within the warm-up' if longer else ''}"
    for rate in told.rates:
        yield f"step {rate.step:,}", f"{rate.lr:.6g}  {rate.what}"
    yield "optimizer", told.optimizer
