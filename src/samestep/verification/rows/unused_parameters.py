"""Parameters: each gets a gradient in every step, or ranks would wait for it forever.

With `--find-unused` or `--static-graph` they do not wait, and the rows of the training tell
whether they agree.
"""

import re

from samestep.errors import listed
from samestep.reporting.words import count
from samestep.verification.evidence import Cause, Check, Evidence, TableRow, cause_check
from samestep.verification.exchange import RankFailure, RecipeFacts, decoded
from samestep.verification.recipe_under_test import RecipeUnderTest

NAME = "parameters"
CAUSE = "unused parameters"
_UNUSED = re.compile(
    r"does not depend on|finished reduction in the prior iteration|find_unused_parameters"
)


def _look(tested: RecipeUnderTest) -> list[str]:
    named = tested.free_step.model.named_parameters()
    return [name for name, p in named if p.requires_grad and p.grad is None]


def unused_parameters(facts: RecipeFacts) -> list[str]:
    """Return the parameters without a gradient."""
    return decoded(facts.found, NAME, list[str]) or []


def _cause(names: list[str]) -> Cause:
    loss = f"The loss does not depend on {listed(names)}"
    if not names:
        loss = "In some steps the loss does not depend on all parameters"
    why = f"{loss}, so ranks would wait for a gradient that never comes."
    advice = (
        "Use them in forward in every step, or freeze them: requires_grad_(False). If it is a "
        "model with branches that some steps leave out by intent, add --find-unused."
    )
    return Cause(CAUSE, why, advice)


def _explain_failure(evidence: Evidence, failure: RankFailure) -> Cause | None:
    return _cause(unused_parameters(evidence.facts)) if _UNUSED.search(failure.message) else None


def _answer(evidence: Evidence) -> Check:
    names = unused_parameters(evidence.facts)
    compared = "every parameter gets a gradient"
    if not names:
        return Check("same", compared)
    if evidence.allows_unused:
        return Check("same", f"{count(len(names), 'parameter')} unused in a step, as you allow")
    return cause_check(evidence, compared, _cause(names), first_parameter=names[0])


ROW = TableRow(name=NAME, look=_look, answer=_answer, explain_failure=_explain_failure)
