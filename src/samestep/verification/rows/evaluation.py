"""Evaluation: every sample is evaluated once, whatever the number of ranks."""

from collections import Counter

from samestep.reporting.words import count
from samestep.verification.evidence import Check, Evidence, TableRow
from samestep.verification.rows import sample_order
from samestep.verification.rows.augmentation import changing_part
from samestep.verification.short_trainings import MAIN


def _answer(evidence: Evidence) -> Check:
    wanted = Counter(evidence.reference.evaluated)
    samples = count(wanted.total(), f"{evidence.facts.evaluates} sample")
    compared = f"each of {samples} once"
    changing = "samples change when read" if changing_part(evidence) == "dataset" else ""
    if skipped := changing or evidence.not_compared():
        return Check("skipped", skipped)
    for start in evidence.several:
        traces = evidence.traces.get((start.place, MAIN), [])
        if traces and Counter(mark for trace in traces for mark in trace.evaluated) != wanted:
            return Check("different", compared, cause=sample_order.CAUSE)
    return Check("same", compared)


ROW = TableRow(name="evaluation", answer=_answer)
