"""Stop and resume: each start resumes the checkpoint of the one before, on its own ranks."""

from samestep.verification.evidence import Check, Evidence, TableRow, failed_start, training_check
from samestep.verification.short_trainings import ShortTraining

_TRAINING = ShortTraining(name="resumed", resumes=True)


def _answer(evidence: Evidence) -> Check:
    compared, closing = f"after step {evidence.facts.size.stop}", evidence.starts[-1].place
    if evidence.died(closing):
        return failed_start(evidence, compared, closing)
    found = evidence.compare_starts(_TRAINING.name)
    pairs = [f"{evidence.starts[s.place - 1].world_size}→{s.world_size}" for s in found]
    sizes = f"rank{'s' if evidence.several else ''} {', '.join(pairs)}"
    return training_check(evidence, _TRAINING.name, compared, found, sizes)


ROW = TableRow(name="stop and resume", answer=_answer, thorough=True, training=_TRAINING)
