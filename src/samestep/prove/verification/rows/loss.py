"""The rows about the loss: of a batch it is the mean of its parts, also of the incomplete batch."""

import contextlib
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from samestep.base.trees import map_leaves, tree_leaves
from samestep.base.words import count
from samestep.core.learner.apply import terms_of
from samestep.prove.verification import causes
from samestep.prove.verification.causes import Cause
from samestep.prove.verification.evidence import Check, Evidence, TableRow, cause_check
from samestep.prove.verification.recipe_under_test import HeldForward, RecipeUnderTest, first_line
from samestep.prove.verification.rows.data import changing_part
from samestep.prove.verification.rows.state import state_of
from samestep.prove.verification.short_trainings import RankFailure
from samestep.prove.verification.trace import largest_apart, relative


class LossOfParts(NamedTuple):
    """How far batches' losses are from what their parts' losses say."""

    full: float
    """Relative difference from their mean for the full batches, or from their sum where that is
    what the recipe says of its loss."""
    uneven: float  # the same for the incomplete batch
    cause: Cause = causes.NOT_A_MEAN  # what it means if full batches differ beyond rounding
    over_batch: bool = False
    """Whether the recipe says that it is made over the whole batch: it is not compared then."""


def _compare_parts(tested: RecipeUnderTest) -> LossOfParts | None:
    """Compare batches' losses with their parts', which are as small as those of the ranks."""
    if tested.recipe.loss_over == "batch":
        return LossOfParts(0.0, 0.0, over_batch=True)
    held = tested.held_outputs
    size, model = tested.size, tested.held_model() if held is None else held.model
    if held is None:  # parts cannot be cut from the outputs; those of a batch are forwards
        inputs = tested.batch().inputs
        pairs = zip(*(tree_leaves(tested.forward(model, inputs)) for _ in range(2)), strict=True)
        is_loss = all(isinstance(o, Tensor) and o.dim() == 0 and o.equal(b) for o, b in pairs)
        if tested.recipe.collate is None or not is_loss:
            return None
    parts = [_differences_from_parts(tested, model, step) for step in range(size.full)]
    full, from_other = (max(apart) for apart in zip(*parts, strict=True))
    uneven = 0.0
    if not size.drop_last:
        with contextlib.suppress(Exception):  # the row of the last batch says that it fails
            uneven, _ = _differences_from_parts(tested, model, size.full)
    adds_up = from_other <= tested.rounding < full
    if tested.recipe.reduction == "sum":
        cause = causes.A_MEAN if adds_up else causes.NOT_A_SUM
    else:
        cause = causes.A_SUM if adds_up else causes.NOT_A_MEAN
    if tested.recipe.loss_terms is not None:
        cause = causes.OF_TERMS
    if full > tested.rounding and not adds_up and held is not None:
        if _is_padded(tested, model):
            cause = causes.PADDED
        elif _compares(tested, held):
            cause = causes.OF_BATCH
    return LossOfParts(full, uneven, cause)


def _is_padded(tested: RecipeUnderTest, model: nn.Module) -> bool:
    """Whether parts of batches have the losses that they should while they are not collated."""
    try:
        steps = range(tested.size.full)
        apart = [_differences_from_parts(tested, model, k, collate=False) for k in steps]
        return max(apart)[0] <= tested.rounding
    except Exception:  # outputs or targets cannot be cut
        return False


def _compares(tested: RecipeUnderTest, held: HeldForward) -> bool:
    """Whether the gradients of the first outputs change when the last outputs do.

    Those of a mean do not, whatever its weights are made of: targets stay as they are.
    """
    half = held.block.rows // 2

    def gradients(change: float) -> list[Tensor]:
        def leaf(output: Tensor) -> Tensor:
            if not output.is_floating_point() or output.dim() == 0:
                return output
            moved = output.clone()
            moved[half:] += change * (1 + torch.arange(moved[half:].numel()).view_as(moved[half:]))
            return moved.requires_grad_()

        outputs = map_leaves(leaf, held.outputs)
        leaves = [o for o in tree_leaves(outputs) if o.requires_grad]
        loss = tested.loss(outputs, held.block.targets)
        gradient_of = torch.autograd.grad(loss, leaves, allow_unused=True)
        return [gradient[:half] for gradient in gradient_of if gradient is not None]

    try:
        pairs = zip(gradients(0.0), gradients(0.01), strict=True)
        return any(largest_apart(*pair) > max(tested.rounding, 1e-9) for pair in pairs)
    except Exception:  # a loss without gradients for such outputs: the trainings tell of it
        return False


def _differences_from_parts(
    tested: RecipeUnderTest, model: nn.Module, step: int, *, collate: bool = True
) -> tuple[float, float]:
    """Return a loss's difference from its parts' weighted mean, and from their sum.

    The other way round where the recipe says that it is a sum. Parts are collated, or cut.
    """
    block = tested.batch(step)
    rows, terms = block.rows, terms_of(tested.recipe)
    if rows < 2:
        return 0.0, 0.0
    last = max(1, rows // max(2, tested.size.ranks))
    losses = []
    with torch.no_grad():
        outputs = tested.forward(model, block.inputs)
        batch_loss = float(tested.loss(outputs, block.targets))
        for start, number in ((0, rows - last), (rows - last, last)):
            part = tested.part(block, start, number)
            if collate and tested.recipe.collate:  # put together anew they may be padded otherwise
                pair = tested.forward(model, part.inputs), part.targets
            else:
                pair = _narrow((outputs, block.targets), start, number)
            weight = float(terms(part.inputs, part.targets)) if terms else number
            if weight:  # a mean over nothing may be NaN, and counts nothing
                losses.append((float(tested.loss(*pair)), weight))
    if not losses:
        return 0.0, 0.0
    mean = sum(loss * weight for loss, weight in losses) / sum(weight for _, weight in losses)
    total, most = sum(loss for loss, _ in losses), sys.float_info.max  # JSON has no infinity
    from_mean, from_sum = (min(relative(batch_loss, value), most) for value in (mean, total))
    is_sum = tested.recipe.reduction == "sum"
    return (from_sum, from_mean) if is_sum else (from_mean, from_sum)


def _narrow(outputs: Any, start: int, number: int) -> Any:
    """Return rows of outputs; what is one number for the batch stays."""
    return map_leaves(lambda o: o.narrow(0, start, number) if o.dim() else o, outputs)


def loss_of_parts(evidence: Evidence) -> LossOfParts | None:
    """Return the result; None for a loss or targets that differ in each call."""
    changes = state_of(evidence).loss or changing_part(evidence) == "collate"
    return None if changes else evidence.result(LOSS.name, LossOfParts)


def _explain_loss(evidence: Evidence) -> Cause | None:
    parts = loss_of_parts(evidence)
    return None if parts is None or parts.full <= evidence.exact else parts.cause


def _loss(evidence: Evidence) -> Check:
    if state_of(evidence).loss:
        return Check("skipped", "it changes from call to call")
    if changing_part(evidence) == "collate":
        return Check("skipped", "collate() draws what it is made of")
    if (parts := loss_of_parts(evidence)) is None:
        return Check("skipped", "outputs are not one per sample")
    if parts.over_batch:
        return Check("skipped", "the recipe makes it over the whole batch")
    compared = "of a batch and of its parts"
    return cause_check(evidence, compared, _explain_loss(evidence), parts.full)


LOSS = TableRow(
    name="loss",
    experiment=_compare_parts,
    answer=_loss,
    explain=_explain_loss,
    with_virtual_ranks=False,
)


def _try_small_batches(tested: RecipeUnderTest) -> dict[int, str]:
    """Return the errors of a batch of the incomplete size and of a single sample, by size."""
    failed = {}
    block = tested.batch()
    for size in (tested.size.rest, 1):
        try:
            part = tested.part(block, 0, size)
            tested.loss(tested.forward(tested.held_model(), part.inputs), part.targets)
        except Exception as error:
            failed[size] = first_line(error)
    return failed


def _uneven(evidence: Evidence, problem: str) -> Cause:
    samples = count(evidence.facts.size.rest, "sample")
    return causes.UNEVEN_BATCH.of(samples=samples, problem=problem)


def _bent(evidence: Evidence) -> Cause | None:
    """Return the cause if the loss of the incomplete batch is not the mean over its samples."""
    parts = loss_of_parts(evidence)
    if parts is None or parts.uneven <= evidence.exact:
        return None
    return _uneven(evidence, "its loss is no longer the mean over its samples")


def _explain_failure(evidence: Evidence, failure: RankFailure) -> Cause | None:
    size = evidence.facts.size
    fails = evidence.result(LAST_BATCH.name, dict[int, str]) or {}
    if failure.step != size.uneven_step and size.rest not in fails:
        return None
    samples = count(size.rest, "sample")
    return _uneven(evidence, f"it fails with {samples}, {size.global_batch} work")


def _last_batch(evidence: Evidence) -> Check:
    size, fails = evidence.facts.size, evidence.result(LAST_BATCH.name, dict[int, str]) or {}
    parts, bent = loss_of_parts(evidence), _bent(evidence)
    bent_in_full_batches = parts is not None and parts.full > evidence.exact
    if size.uneven_step is None:
        return Check("skipped", "--drop-last leaves none")
    compared = f"{count(size.rest, 'sample')} in step {size.uneven_step}"
    if size.rest in fails:
        return cause_check(evidence, compared, _uneven(evidence, f"it fails: {fails[size.rest]}"))
    uneven = parts.uneven if parts else None
    if bent and not bent_in_full_batches:
        return cause_check(evidence, compared, bent, uneven, first_step=size.uneven_step)
    if 1 in fails:
        cause = causes.ONE_SAMPLE.of(error=fails[1])
        return Check("note", "a batch of one sample, as the last may be", cause=cause)
    # If full batches differ too, this one says nothing more.
    if bent_in_full_batches:
        return Check("skipped", "the loss is off in full batches too")
    return cause_check(evidence, f"{compared}, and only 1", None, uneven)


LAST_BATCH = TableRow(
    name="last batch",
    experiment=_try_small_batches,
    answer=_last_batch,
    explain=_bent,
    explain_failure=_explain_failure,
    with_virtual_ranks=False,
)
