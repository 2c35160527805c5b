"""PyTorch Lightning's Trainer takes the same steps, on one process and on the fewest ranks."""

from collections.abc import Iterator

from samestep.settings import Precision
from samestep.verification.difference import TrainingDifference, evaluations_apart, worst
from samestep.verification.evidence import Check, Evidence, TableRow, training_check
from samestep.verification.exchange import RecipeFacts, Start
from samestep.verification.short_trainings import ShortTraining

_NAME = "lightning"


def _trainings(start: Start, facts: RecipeFacts, _chosen: Precision) -> Iterator[ShortTraining]:
    if start.place <= 1 and facts.lightning:
        yield ShortTraining(name=_NAME, precision=facts.exact, evaluates=True, lightning=True)


def _answer(evidence: Evidence) -> Check:
    if not evidence.facts.lightning:
        return Check("skipped", "PyTorch Lightning is not installed")
    found = {
        start: worst([compared, _evaluations(evidence, start)])
        for start, compared in evidence.compare_starts(_NAME).items()
    }
    return training_check(evidence, _NAME, "its Trainer", found)


def _evaluations(evidence: Evidence, start: Start) -> TrainingDifference:
    """Compare what two trainings evaluated after the same steps."""
    one = evidence.reference.evaluations
    other = evidence.traces[start.place, _NAME][0].evaluations
    apart = [evaluations_apart(one[step], other[step]) for step in sorted(one.keys() & other)]
    return worst(TrainingDifference(largest, what=what) for largest, what in apart)


ROW = TableRow(name=_NAME, answer=_answer, trainings=_trainings)
