"""The last batch of an epoch: the incomplete one, and a batch of a single sample, work too."""

from samestep.reporting.words import count
from samestep.verification.evidence import Cause, Check, Evidence, TableRow, cause_check
from samestep.verification.exchange import RankFailure
from samestep.verification.recipe_under_test import RecipeUnderTest, first_line, held_model
from samestep.verification.rows import loss

NAME = "last batch"
CAUSE = "the last uneven batch"


def _look(tested: RecipeUnderTest) -> dict[int, str]:
    """Return how a batch of the incomplete size fails, and one of a single sample."""
    failed = {}
    block = tested.batch()
    for size in (tested.size.rest, 1):
        try:
            part = tested.part(block, 0, size)
            tested.loss(tested.forward(held_model(tested, block), part.inputs), part.targets)
        except Exception as error:
            failed[size] = first_line(error)
    return failed


def _cause(rest: int, why: str) -> Cause:
    return Cause(
        CAUSE,
        f"The last batch of an epoch has {count(rest, 'sample')} here: {why}.",
        "Take the number of samples from the batch (len(inputs)), or leave the last one out: "
        "--drop-last.",
    )


def _bent(evidence: Evidence) -> Cause | None:
    """Return the cause if the loss of the incomplete batch is no mean over its samples."""
    found, rest = loss.loss_of_parts(evidence), evidence.facts.size.rest
    if found is None or found.uneven <= evidence.exact:
        return None
    return _cause(rest, "its loss is no longer the mean over its samples")


def _explain_failure(evidence: Evidence, failure: RankFailure) -> Cause | None:
    size = evidence.facts.size
    fails = evidence.found(NAME, dict[int, str]) or {}
    if failure.step != size.uneven_step and size.rest not in fails:
        return None
    rest = count(size.rest, "sample")
    return _cause(size.rest, f"it fails with {rest}, {size.global_batch} work")


def _answer(evidence: Evidence) -> Check:
    size, fails = evidence.facts.size, evidence.found(NAME, dict[int, str]) or {}
    parts, bent = loss.loss_of_parts(evidence), _bent(evidence)
    bent_in_full_batches = parts is not None and parts.full > evidence.exact
    if size.uneven_step is None:
        return Check("skipped", "--drop-last leaves none")
    compared = f"{count(size.rest, 'sample')} in step {size.uneven_step}"
    if size.rest in fails:
        return cause_check(evidence, compared, _cause(size.rest, f"it fails: {fails[size.rest]}"))
    uneven = parts.uneven if parts else None
    if bent and not bent_in_full_batches:
        return cause_check(evidence, compared, bent, uneven, first_step=size.uneven_step)
    if 1 in fails:
        advice = "Choose sizes that never leave one sample, or --drop-last."
        cause = Cause(CAUSE, f"It fails: {fails[1]}.", advice)
        return Check("note", "a batch of one sample, as the last may be", cause=cause)
    # A loss that is no mean in a full batch says nothing about this one.
    if bent_in_full_batches:
        return Check("skipped", "the loss is bent in full batches too")
    return cause_check(evidence, f"{compared}, and 1 alone", None, uneven)


ROW = TableRow(
    name=NAME,
    look=_look,
    answer=_answer,
    explain=_bent,
    explain_failure=_explain_failure,
    with_virtual_ranks=False,
)
