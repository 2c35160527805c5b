"""Rounding: how far one rounding of the weights moves the losses, where float64 is not possible.

It is the measure of every other row then: what moves the losses much further is no rounding.
"""

from samestep.verification.evidence import Check, Evidence, TableRow
from samestep.verification.short_trainings import NUDGED, ShortTraining


def _answer(evidence: Evidence) -> list[Check]:
    if evidence.trace(0, NUDGED) is None:
        return []
    compared = "losses, weights off by one rounding: the measure"
    return [Check("same", compared, evidence.nudged(), evidence.exact)]


ROW = TableRow(name="rounding", answer=_answer, training=ShortTraining(name=NUDGED, nudged=True))
