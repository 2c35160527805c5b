"""What is equal on other numbers of ranks and what is not, in words."""

from collections.abc import Iterator

from samestep.explanation.explain import Explanation
from samestep.reporting.words import count
from samestep.training.plan import ENDLESS


def others_rows(told: Explanation) -> Iterator[tuple[str, str]]:
    """Yield a table: the same settings on other numbers of ranks."""
    yield "", f"{'samples/step':>12}  {'micro-steps':>11}  {'steps':>9}  {'lr':>8}"
    for other in told.others:
        name = count(other.ranks, "rank")
        if other.refused:
            yield name, f"refused: {other.refused}"
            continue
        steps = f"{other.total_steps:,}" if other.total_steps < ENDLESS else "-"
        this = other.ranks == told.plan.world_size
        word = "this one" if this else "the same" if other.same else "another training"
        portions = f"{other.accumulate} × {other.micro_batch_size}"
        yield (
            name,
            f"{other.global_batch_size:>12,}  {portions:>11}  {steps:>9}  {other.lr:>8.4g}  {word}",
        )


def equal_rows(told: Explanation) -> Iterator[tuple[str, str]]:
    """Yield what stays equal there, and what does not."""
    plan, drawn, virtual = told.plan, told.drawn, told.plan.virtual_ranks
    if any(not (other.same or other.refused) for other in told.others):
        text = (
            "with --batch-size-per-rank, other ranks make another global batch. Keep it with "
            f"--batch-size {plan.global_batch_size}."
        )
        yield "another", text
    if virtual:
        text = (
            f"to the last bit on 1 to {virtual} ranks, dropout and batch normalisation included, "
            "with the same PyTorch on the same model of device"
        )
        yield "equal", text
        return
    text = (
        "with the same global batch: the order of the samples, the samples of each step, the "
        "learning rate, and, to rounding, losses and gradients"
    )
    yield "equal", text
    if drawn is None:
        yield "not equal", "not known here: the model was not tried. samestep verify tries it."
        return
    reasons = list(_differences(told))
    for reason in reasons:
        yield "not equal", reason
    if not reasons:
        without = "has no batch normalisation"
        if drawn.batch_norms:
            without = "normalises over the samples of all ranks (--sync-batchnorm)"
        yield "not equal", f"nothing found: the model draws nothing and {without}"
    else:
        remedy = "" if plan.is_stream else "--virtual-ranks makes them equal; "
        yield "remedy", f"{remedy}samestep verify checks all the rest"


def _differences(told: Explanation) -> Iterator[str]:
    drawn = told.drawn
    assert drawn is not None
    accepted = dict.fromkeys(told.accepts, ", as the recipe accepts")
    if drawn.draws:
        where = sorted({line for line in drawn.draws.values() if line})
        at = f" ({', '.join(where[:3])})" if where else ""
        names = ", ".join(sorted(drawn.draws)[:3])
        yield (
            f"what the model draws from torch: {names}{at}. Each rank draws other numbers"
            f"{accepted.get('dropout', '')}."
        )
    if drawn.batch_norms and not told.settings.sync_batchnorm:
        more = len(drawn.batch_norms) - 1
        named = drawn.batch_norms[0] + (f" and {more} more" if more else "")
        yield (
            f"batch normalisation ({named}): it normalises over the {told.step.most} samples of a "
            f"micro-step{accepted.get('batchnorm', '')}."
        )
    if drawn.generators:
        yield f"{' and '.join(drawn.generators)}: each rank draws other numbers."
