"""One process trains without a failure; all other rows are compared with it."""

from samestep.reporting.words import count
from samestep.verification.evidence import Check, Evidence, TableRow, failed_start
from samestep.verification.short_trainings import MAIN


def _answer(evidence: Evidence) -> Check:
    size = evidence.facts.size
    if not evidence.trace(0, MAIN) or evidence.died(0):
        compared = f"{size.steps} steps of {count(size.global_batch, 'sample')}"
        return failed_start(evidence, compared, 0)
    losses = evidence.reference.losses
    return Check("same", f"{size.steps} steps: loss {losses[1]:.4g} to {losses[size.steps]:.4g}")


ROW = TableRow(name="one process", answer=_answer)
