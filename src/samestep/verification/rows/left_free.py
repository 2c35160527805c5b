"""What differs on other numbers of ranks by itself: left as it is, one kind at a time.

BatchNorm, draws from torch, and draws from Python and NumPy would hide every other difference.
All trainings hold them still but these, so a difference here has this one cause.
"""

from dataclasses import replace

from samestep.training.side_effects import Kind
from samestep.verification.evidence import NOT_REACHED, Cause, Check, Evidence, measured
from samestep.verification.short_trainings import MAIN, ShortTraining


def left_free(kind: Kind) -> ShortTraining:
    """Return the short training that leaves one kind as it is."""
    return ShortTraining(name=f"{kind} as it is", free=frozenset({kind}), short=True)


def answer(evidence: Evidence, kind: Kind, compared: str, cause: Cause) -> Check:
    """Return the check of one kind: the same, different, or different and accepted."""
    name = left_free(kind).name
    one, many = evidence.trace(0, name), evidence.trace(1, name)
    if one is None or many is None:
        return Check("skipped", f"{compared}; {evidence.not_compared() or NOT_REACHED}")
    check = measured(
        f"{compared}, on {evidence.starts[1].world_size} ranks",
        evidence.compare(many, name, reference=one),
        evidence.tolerance_of(MAIN),
        cause,
    )
    if check.passed or kind == "state" or kind not in evidence.accepts:
        return check
    return replace(check, status="accepted", cause=replace(cause, advice=""))
