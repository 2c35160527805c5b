"""Samples apart: the model's output for a sample does not depend on the rest of the batch."""

from samestep.data.trees import narrow
from samestep.verification.evidence import Cause, Check, Evidence, TableRow, cause_check
from samestep.verification.module_outputs import ModuleDifference, first_difference
from samestep.verification.recipe_under_test import RecipeUnderTest
from samestep.verification.rows.state import remembers

NAME = "samples apart"
CAUSE = "samples that see each other"


def _look(tested: RecipeUnderTest) -> ModuleDifference | None:
    """Return the first module that gives a sample something else without the others."""
    held = tested.held_forward
    if held is None or held.block.rows < 2:
        return None
    inputs, rows = held.block.inputs, held.block.rows // 2
    return first_difference(tested, held.model, inputs, narrow(inputs, 0, rows), rows=rows)


def _explain(evidence: Evidence) -> Cause | None:
    found = evidence.found(NAME, ModuleDifference)
    # A module that remembers something gives another output each time, whatever the batch.
    if found is None or remembers(evidence):
        return None
    return Cause(
        CAUSE,
        f"{found.module} gives a sample something else ({found.difference:.0e}) when other "
        "samples are beside it: it computes over the batch, and each rank has its own.",
        "Compute over a sample's own values (GroupNorm, LayerNorm), or over all ranks.",
    )


def _answer(evidence: Evidence) -> Check:
    found, cause = evidence.found(NAME, ModuleDifference), _explain(evidence)
    difference = found.difference if found and cause else None
    return cause_check(evidence, "outputs, with others in the batch", cause, difference)


ROW = TableRow(name=NAME, look=_look, answer=_answer, explain=_explain)
