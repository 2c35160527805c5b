"""PyTorch Lightning's Trainer takes the same steps, on one process and on the fewest ranks."""

from samestep.verification.difference import TrainingDifference, evaluations_apart, worst
from samestep.verification.evidence import Check, Evidence, TableRow, training_check
from samestep.verification.short_trainings import ShortTraining

_NAME = "lightning"
_LONGEST = 160
_TRAINING = ShortTraining(name=_NAME, evaluates=True, lightning=True)


def _answer(evidence: Evidence) -> Check:
    if not evidence.facts.lightning:
        return Check("skipped", "not installed, or without loss_terms and --ema")
    one_process = evidence.failures(training=_NAME, place=0)
    if one_process:  # it cannot train this at all, which says nothing of the training
        return Check("skipped", f"its Trainer cannot: {one_process[0].message}"[:_LONGEST])
    found, one = evidence.compare_starts(_NAME), evidence.reference.evaluations
    for start, compared in found.items():
        other = evidence.traces[start.place, _NAME][0].evaluations
        apart = [evaluations_apart(one[step], other[step]) for step in sorted(one.keys() & other)]
        found[start] = worst([compared, *(TrainingDifference(d, what=what) for d, what in apart)])
    return training_check(evidence, _NAME, "its Trainer", found)


ROW = TableRow(
    name=_NAME, answer=_answer, thorough=True, training=_TRAINING, with_virtual_ranks=False
)
