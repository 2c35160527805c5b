"""Accumulation: a rank that takes its share in two micro-steps trains the same."""

from samestep.verification.evidence import Check, Evidence, TableRow, training_check
from samestep.verification.short_trainings import ShortTraining

_TRAINING = ShortTraining(name="accumulated", halves=True, short=True)


def _answer(evidence: Evidence) -> Check:
    if not evidence.bits:
        return training_check(evidence, _TRAINING.name, "2 micro-steps per step")
    one = evidence.trace(0, _TRAINING.name)
    if one is None and not evidence.failures(training=_TRAINING.name):
        return Check("skipped", "a virtual rank has too few samples")
    # Batch normalisation and dropout see micro-steps: one process takes them, too.
    found = evidence.compare_starts(_TRAINING.name, reference=one)
    return training_check(evidence, _TRAINING.name, "2 micro-steps each", found)


ROW = TableRow(name="accumulation", answer=_answer, thorough=True, training=_TRAINING)
