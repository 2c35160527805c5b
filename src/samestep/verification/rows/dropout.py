"""Dropout, and everything else that forward or loss draws from torch."""

from samestep.verification.evidence import Cause, Check, Evidence, TableRow
from samestep.verification.recipe_under_test import RecipeUnderTest
from samestep.verification.rows.left_free import answer, left_free

NAME = CAUSE = "dropout"


def _look(tested: RecipeUnderTest) -> dict[str, str]:
    """Return each random operation of torch with the line that calls it, if it is the user's."""
    return tested.free_step.seen.draws


def _answer(evidence: Evidence) -> Check:
    draws = evidence.found(NAME, dict[str, str])
    if not draws:
        return Check("same", "the model draws nothing from torch")
    lines = sorted({line for line in draws.values() if line})
    where = f" ({', '.join(lines[:3])})" if lines else ""
    cause = Cause(
        CAUSE,
        f"The model draws from torch{where}. Each rank draws other numbers, since it holds other "
        "samples; with the draws held still the difference is gone.",
        "Is it intended? Then accept it: --accept dropout, in the recipe "
        'accepts=("dropout",); or compare losses alone, up to --tolerance 0.1. Otherwise set its '
        "probability to 0.",
    )
    return answer(evidence, "dropout", "draws as they are", cause)


ROW = TableRow(
    name=NAME, look=_look, training=left_free("dropout"), answer=_answer, with_virtual_ranks=False
)
