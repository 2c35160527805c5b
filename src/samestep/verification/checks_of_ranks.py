"""The checklist beside the training: evaluation, metrics, one writer, checkpoints on one device."""

from collections import Counter

from samestep.screen.words import count
from samestep.verification import causes
from samestep.verification.difference import Difference, evaluations_apart
from samestep.verification.evidence import Check, Evidence
from samestep.verification.situations import MAIN

ONE_WRITER = "one writer"
"""The row that says nothing of the training itself."""


def rank_checks(evidence: Evidence) -> list[Check]:
    """Return the rows of what the ranks do together beside training."""
    return [_evaluation(evidence), _metrics(evidence), _writer(evidence), _one_device(evidence)]


def _evaluation(evidence: Evidence) -> Check:
    """Every sample is evaluated once, whatever the number of ranks."""
    reference, facts = evidence.reference, evidence.facts
    assert reference is not None
    wanted = Counter(reference.evaluated)
    samples = count(len(reference.evaluated), f"{facts.evaluates} sample")
    compared = f"each of {samples} once"
    if facts.unsteady == "dataset":
        return Check(name="evaluation", status="skipped", compared="samples change when read")
    if evidence.uncompared():
        return Check(name="evaluation", status="skipped", compared=evidence.uncompared())
    for start in evidence.middle:
        traces = evidence.traces.get((start.place, MAIN), [])
        evaluated = Counter(mark for trace in traces for mark in trace.evaluated)
        if traces and evaluated != wanted:
            cause = causes.order()
            return Check(
                name="evaluation",
                status="different",
                compared=compared,
                cause=cause.name,
                why=cause.why,
                advice=cause.advice,
            )
    return Check(name="evaluation", status="same", compared=compared)


def _metrics(evidence: Evidence) -> Check:
    """The same weights give the same metrics on any number of ranks."""
    reference = evidence.reference
    assert reference is not None
    one, tolerance = reference.evaluations[0], evidence.exact
    compared = f"{', '.join(one)} before training"
    if evidence.uncompared():
        return Check(name="metrics", status="skipped", compared=evidence.uncompared())
    largest, name = 0.0, ""
    for start in evidence.middle:
        trace = evidence.trace(start.place, MAIN)
        if trace is not None and 0 in trace.evaluations:
            largest, name = max((largest, name), evaluations_apart(one, trace.evaluations[0]))
    if largest <= tolerance:
        return Check(
            name="metrics",
            status="same",
            compared=compared,
            tolerance=tolerance,
            difference=largest,
        )
    told = [rank for ranks in evidence.told.values() for rank in ranks]
    across = any(rank.across.get(name, 0.0) > tolerance for rank in told)
    if across or evidence.facts.metrics.get(name, 0.0) > tolerance:
        cause = causes.metric(name, across=across)
    else:
        cause = causes.likely(evidence, Difference(largest, what=name))
    return Check(
        name="metrics",
        status="different",
        compared=compared,
        tolerance=tolerance,
        difference=largest,
        cause=cause.name,
        why=cause.why,
        advice=cause.advice,
    )


def _writer(evidence: Evidence) -> Check:
    """No two ranks write the same file, and rank 0 alone prints."""
    written = _written_by_several(evidence)
    compared = "what other ranks than 0 print, write"
    if not evidence.middle:
        return Check(name=ONE_WRITER, status="skipped", compared=evidence.uncompared())
    if written:
        path, line = next(iter(written.items()))
        more = len(written) - 1
        also = f" and {more} more file{'s' * (more > 1)}" if more else ""
        return Check(
            name=ONE_WRITER,
            status="different",
            compared=compared,
            cause="every rank writes",
            why=f"{line} writes {path}{also} on every rank, all at once.",
            advice="A recipe's code runs on every rank: write the file before training, or put the "
            'rank into its name: os.environ.get("RANK", "0").',
        )
    others = [found for start in evidence.middle for found in evidence.told[start.place][1:]]
    printed = {line: text for found in others for line, text in found.printed.items()}
    if printed:
        line, text = next(iter(printed.items()))
        return Check(
            name=ONE_WRITER,
            status="note",
            compared=compared,
            cause="every rank prints",
            why=f"{line} prints {text!r} on every rank; samestep shows rank 0's and keeps the "
            "others in rank-N.log.",
        )
    return Check(name=ONE_WRITER, status="same", compared=compared)


def _written_by_several(evidence: Evidence) -> dict[str, str]:
    """Return the files that two ranks of one start wrote, each with the user's line."""
    written: dict[str, str] = {}
    for ranks in evidence.told.values():
        writers = Counter(path for told in ranks for path in told.written)
        lines = {path: line for told in ranks for path, line in told.written.items()}
        written |= {path: lines[path] for path, times in writers.items() if times > 1}
    return written


def _one_device(evidence: Evidence) -> Check:
    """A checkpoint of several ranks is loaded and evaluated by one process alone."""
    last = evidence.starts[-1]
    before, stop = evidence.starts[-2], evidence.facts.cut.stop
    trace = evidence.trace(before.place, MAIN)
    loaded = next((t.loaded for t in evidence.told.get(last.place, []) if t.loaded), None)
    name = "one device"
    if not evidence.middle:
        return Check(name=name, status="skipped", compared=evidence.uncompared())
    compared = f"a checkpoint of {before.world_size} ranks, evaluated"
    if trace is None or loaded is None or stop not in trace.evaluations:
        return Check(name=name, status="skipped", compared="there is no checkpoint to load")
    apart, value = evaluations_apart(trace.evaluations[stop], loaded)
    if apart <= evidence.exact:
        return Check(
            name=name, status="same", compared=compared, tolerance=evidence.exact, difference=apart
        )
    if not _metrics(evidence).passed:
        return Check(name=name, status="skipped", compared="metrics differ by themselves")
    cause = causes.likely(evidence, Difference(apart, what=value))
    return Check(
        name=name,
        status="different",
        compared=compared,
        tolerance=evidence.exact,
        difference=apart,
        cause=cause.name,
        why=cause.why,
        advice=cause.advice,
    )
