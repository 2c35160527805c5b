"""Accumulation: a rank that takes its share in two micro-steps trains the same."""

from collections.abc import Iterator

from samestep.settings import Precision
from samestep.verification.evidence import Check, Evidence, TableRow, training_check
from samestep.verification.exchange import RecipeFacts, Start
from samestep.verification.short_trainings import ShortTraining

_TRAINING = "accumulated"


def _trainings(_start: Start, facts: RecipeFacts, _chosen: Precision) -> Iterator[ShortTraining]:
    yield ShortTraining(name=_TRAINING, precision=facts.exact, halves=True, short=True)


def _answer(evidence: Evidence) -> Check:
    found = evidence.compare_starts(_TRAINING)
    return training_check(evidence, _TRAINING, "2 micro-steps per step", found)


ROW = TableRow(name="accumulation", answer=_answer, trainings=_trainings)
