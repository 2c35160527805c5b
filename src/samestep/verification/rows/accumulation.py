"""Accumulation: a rank that takes its share in two micro-steps trains the same."""

from samestep.verification.evidence import Check, Evidence, TableRow, training_check
from samestep.verification.short_trainings import ShortTraining

_TRAINING = ShortTraining(name="accumulated", halves=True, short=True)


def _answer(evidence: Evidence) -> Check:
    return training_check(evidence, _TRAINING.name, "2 micro-steps per step")


ROW = TableRow(name="accumulation", answer=_answer, thorough=True, training=_TRAINING)
