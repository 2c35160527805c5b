"""PyTorch Lightning's Trainer takes the same steps, on one process and on the fewest ranks."""

from samestep.verification.difference import TrainingDifference, evaluations_apart, worst
from samestep.verification.evidence import Check, Evidence, TableRow, training_check
from samestep.verification.exchange import Start
from samestep.verification.short_trainings import PlannedStart, ShortTraining

_NAME = "lightning"


def _trainings(planned: PlannedStart) -> list[ShortTraining]:
    precision = planned.facts.exact
    training = ShortTraining(name=_NAME, precision=precision, evaluates=True, lightning=True)
    return [training] if planned.start.place <= 1 and planned.facts.lightning else []


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
