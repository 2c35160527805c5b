"""The precision of the user's settings, where it is not the one that decides: losses alone."""

from dataclasses import replace

from samestep.verification.evidence import OWN_PRECISION, Check, Evidence, TableRow, training_check
from samestep.verification.short_trainings import ShortTraining

_TRAINING = ShortTraining(name=OWN_PRECISION, own_precision=True)


def _answer(evidence: Evidence) -> list[Check]:
    one = evidence.trace(0, OWN_PRECISION)
    found = {
        start: evidence.compare(trace, OWN_PRECISION, reference=one)
        for start in evidence.several
        if one and (trace := evidence.trace(start.place, OWN_PRECISION))
    }
    trained = one is not None and not evidence.failures(training=OWN_PRECISION)
    if evidence.chosen == evidence.facts.exact or (trained and not found):
        return []
    check = training_check(evidence, OWN_PRECISION, "losses", found)
    return [replace(check, name=evidence.chosen)]


ROW = TableRow(name=OWN_PRECISION, answer=_answer, thorough=True, training=_TRAINING)
