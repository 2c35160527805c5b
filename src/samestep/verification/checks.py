"""From the evidence to the rows of the table."""

from samestep.screen.words import count, ranks
from samestep.verification import causes
from samestep.verification.causes import Cause
from samestep.verification.checks_of_causes import cause_checks
from samestep.verification.checks_of_ranks import rank_checks
from samestep.verification.difference import Difference, difference, evaluations_apart, worst
from samestep.verification.evidence import Check, Evidence
from samestep.verification.messages import Failure
from samestep.verification.situations import ACCUMULATED, LIGHTNING, MAIN, PRECISION, RESUMED, Start
from samestep.verification.trace import Trace


def judge(evidence: Evidence) -> list[Check]:
    """Return all rows, in the order of the table."""
    if evidence.reference is None:
        return [_one_process(evidence)]
    return [
        _one_process(evidence),
        *(_ranks(evidence, start) for start in evidence.middle),
        *_precision(evidence),
        _accumulation(evidence),
        _resume(evidence),
        *_lightning(evidence),
        *cause_checks(evidence),
        *rank_checks(evidence),
    ]


def _one_process(evidence: Evidence) -> Check:
    cut, reference = evidence.facts.cut, evidence.reference
    compared = f"{cut.steps} steps of {count(cut.global_batch, 'sample')}"
    if reference is None or _died(evidence, 0):
        return _failed_start("one process", compared, evidence, 0)
    first, last = reference.losses[1], reference.losses[cut.steps]
    compared = f"{cut.steps} steps: loss {first:.4g} to {last:.4g}"
    return Check(name="one process", status="same", compared=compared)


def _ranks(evidence: Evidence, start: Start) -> Check:
    cut, size = evidence.facts.cut, start.world_size
    name = f"{size} ranks"
    shares = [cut.global_batch // size + (r < cut.global_batch % size) for r in range(size)]
    parts = f"{size} × {shares[0]}" if len(set(shares)) == 1 else " + ".join(map(str, shares))
    # Those of the ranks among each other are compared even where losses decide.
    what = "losses, ranks' weights" if evidence.losses_only() else "loss, gradients, weights"
    compared = f"{what}: {parts}"
    reference, trace = evidence.reference, evidence.trace(start.place, MAIN)
    assert reference is not None
    if trace is None or _died(evidence, start.place):
        return _failed_start(name, compared, evidence, start.place)
    found = worst([evidence.compare(reference, trace), _between_ranks(evidence, start)])
    return _compared(name, compared, evidence, found)


def _between_ranks(evidence: Evidence, start: Start) -> Difference:
    """Compare the weights that the ranks of a start hold at its end."""
    traces = evidence.traces[start.place, MAIN]
    last = evidence.facts.cut.steps
    weights = [Trace(losses={last: 0.0}, weights={last: t.weights[last]}) for t in traces]
    return worst(difference(weights[0], other, evidence.exact) for other in weights[1:])


def _precision(evidence: Evidence) -> list[Check]:
    if evidence.chosen == evidence.facts.exact:
        return []
    reference = evidence.trace(0, PRECISION)
    if reference is None or _failures(evidence, PRECISION):
        return [_failed_or_skipped(evidence.chosen, "losses", evidence, PRECISION)]
    found = [
        (start.world_size, evidence.compare(reference, trace, PRECISION))
        for start in evidence.middle
        if (trace := evidence.trace(start.place, PRECISION)) is not None
    ]
    if not found:
        return []
    sizes = ranks(size for size, _ in found)
    return [
        _compared(
            evidence.chosen, f"losses: {sizes}", evidence, worst(d for _, d in found), PRECISION
        )
    ]


def _accumulation(evidence: Evidence) -> Check:
    reference = evidence.reference
    assert reference is not None
    found = {
        start.world_size: evidence.compare(reference, trace)
        for start in evidence.starts
        if (trace := evidence.trace(start.place, ACCUMULATED)) is not None
    }
    compared = "2 micro-steps a step"
    if not found or _failures(evidence, ACCUMULATED):
        return _failed_or_skipped("accumulation", compared, evidence, ACCUMULATED)
    compared = f"{compared}: {ranks(found)}"
    return _compared("accumulation", compared, evidence, worst(found.values()))


def _resume(evidence: Evidence) -> Check:
    reference, stop = evidence.reference, evidence.facts.cut.stop
    assert reference is not None
    found = []
    pairs = []
    for before, start in zip(evidence.starts, evidence.starts[1:], strict=False):
        trace = evidence.trace(start.place, RESUMED)
        if trace is not None:
            found.append(evidence.compare(reference, trace))
            pairs.append(f"{before.world_size}→{start.world_size}")
    closing = evidence.starts[-1].place
    if _died(evidence, closing):
        return _failed_start("stop and resume", f"after step {stop}", evidence, closing)
    if not found or _failures(evidence, RESUMED):
        return _failed_or_skipped("stop and resume", f"after step {stop}", evidence, RESUMED)
    several = "s" if evidence.middle else ""
    compared = f"after step {stop}: rank{several} {', '.join(pairs)}"
    return _compared("stop and resume", compared, evidence, worst(found))


def _lightning(evidence: Evidence) -> list[Check]:
    if not evidence.facts.lightning:
        return [
            Check(name="lightning", status="skipped", compared="PyTorch Lightning is not installed")
        ]
    reference = evidence.reference
    assert reference is not None
    found = {
        start.world_size: worst([evidence.compare(reference, t), _evaluations(reference, t)])
        for start in evidence.starts[:2]
        if (t := evidence.trace(start.place, LIGHTNING)) is not None
    }
    if not found or _failures(evidence, LIGHTNING):
        return [_failed_or_skipped("lightning", "its Trainer", evidence, LIGHTNING)]
    compared = f"its Trainer on {ranks(found)}"
    return [_compared("lightning", compared, evidence, worst(found.values()))]


def _evaluations(reference: Trace, other: Trace) -> Difference:
    """Compare what two trainings evaluated after the same steps."""
    both = sorted(reference.evaluations.keys() & other.evaluations.keys())
    apart = [evaluations_apart(reference.evaluations[k], other.evaluations[k]) for k in both]
    largest, what = max(apart, default=(0.0, ""))
    return Difference(largest, what=what)


def _compared(
    name: str, compared: str, evidence: Evidence, found: Difference, situation: str = MAIN
) -> Check:
    tolerance = evidence.tolerance_of(situation)
    same = found.largest <= tolerance
    cause = None if same else causes.likely(evidence, found)
    return Check(
        name=name,
        status="same" if same else "different",
        compared=compared,
        tolerance=tolerance,
        difference=found.largest,
        first_step=found.first_step,
        first_parameter=found.first_parameter,
        **_words(cause),
    )


def _died(evidence: Evidence, place: int) -> bool:
    """Whether a start ended before it could say why."""
    return place in evidence.ended and evidence.failure(place) is None


def _failed_start(name: str, compared: str, evidence: Evidence, place: int) -> Check:
    failure = evidence.failure(place)
    message = failure.message if failure else evidence.ended.get(place, "it ended")
    return _failed(name, compared, evidence, failure, message)


def _failed(
    name: str, compared: str, evidence: Evidence, failure: Failure | None, message: str
) -> Check:
    cause = causes.of_failure(evidence, failure, message)
    step = failure.step if failure else 0
    words = _words(cause)
    words["why"] = " ".join([f"It failed: {message.rstrip('.')}.", words.get("why", "")]).strip()
    return Check(name=name, status="different", compared=compared, first_step=step or None, **words)  # type: ignore[arg-type]


def _failed_or_skipped(name: str, compared: str, evidence: Evidence, situation: str) -> Check:
    """Return the row of a situation that a start did not come through."""
    failed = _failures(evidence, situation)
    if failed:
        return _failed(name, compared, evidence, failed[0], failed[0].message)
    return Check(name=name, status="skipped", compared="the ranks did not come so far")


def _failures(evidence: Evidence, situation: str) -> list[Failure]:
    """Return the failures in a situation, causes before effects."""
    told = [rank for ranks in evidence.told.values() for rank in ranks]
    found = [f for rank in told for f in rank.failures if f.situation == situation]
    return sorted(found, key=lambda f: f.lost_peer)


def _words(cause: Cause | None) -> dict[str, str]:
    if cause is None:
        return {}
    return {"cause": cause.name, "why": cause.why, "advice": cause.advice}
