"""Accumulation: a rank that takes its share in two micro-steps trains the same."""

from samestep.verification.evidence import Check, Evidence, TableRow, training_check
from samestep.verification.short_trainings import PlannedStart, ShortTraining

_TRAINING = "accumulated"


def _trainings(planned: PlannedStart) -> list[ShortTraining]:
    precision = planned.facts.exact
    return [ShortTraining(name=_TRAINING, precision=precision, halves=True, short=True)]


def _answer(evidence: Evidence) -> Check:
    found = evidence.compare_starts(_TRAINING)
    return training_check(evidence, _TRAINING, "2 micro-steps per step", found)


ROW = TableRow(name="accumulation", answer=_answer, trainings=_trainings)
