"""Stop and resume: each start resumes the checkpoint of the one before, on its own ranks."""

from samestep.verification.evidence import Check, Evidence, TableRow, failed_start, training_check
from samestep.verification.short_trainings import PlannedStart, ShortTraining

_TRAINING = "resumed"


def _trainings(planned: PlannedStart) -> list[ShortTraining]:
    resumes, precision = planned.start.resumes, planned.facts.exact
    training = ShortTraining(name=_TRAINING, precision=precision, resumes=resumes)
    return [] if resumes is None else [training]


def _answer(evidence: Evidence) -> Check:
    compared, closing = f"after step {evidence.facts.size.stop}", evidence.starts[-1].place
    if evidence.died(closing):
        return failed_start(evidence, compared, closing)
    found = evidence.compare_starts(_TRAINING)
    pairs = [f"{evidence.starts[s.place - 1].world_size}→{s.world_size}" for s in found]
    several = "s" if evidence.several else ""
    return training_check(
        evidence, _TRAINING, compared, found, lambda _sizes: f"rank{several} {', '.join(pairs)}"
    )


ROW = TableRow(name="stop and resume", answer=_answer, trainings=_trainings)
