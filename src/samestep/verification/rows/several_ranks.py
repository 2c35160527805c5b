"""Several ranks train as one process does, and hold the same weights; a row for each number."""

from dataclasses import replace

from samestep.verification.difference import difference, worst
from samestep.verification.evidence import Check, Evidence, TableRow, failed_start, measured
from samestep.verification.exchange import Start
from samestep.verification.short_trainings import MAIN, ShortTraining
from samestep.verification.trace import Trace


def _answer(evidence: Evidence) -> list[Check]:
    return [
        replace(_compare(evidence, start), name=f"{start.world_size} ranks")
        for start in evidence.several
    ]


def _compare(evidence: Evidence, start: Start) -> Check:
    virtual = evidence.facts.virtual_ranks
    shared = virtual or evidence.facts.size.global_batch
    smallest, larger = divmod(shared, start.world_size)
    shares = [smallest + (rank < larger) for rank in range(start.world_size)]
    parts = " + ".join(map(str, shares)) if larger else f"{start.world_size} × {smallest}"
    # The weights of ranks are compared with each other even where losses alone decide.
    what = "losses, ranks' weights" if evidence.losses_only() else "loss, gradients, weights"
    compared = f"{parts} virtual ranks" if virtual else f"{what}: {parts}"
    trace = evidence.trace(start.place, MAIN)
    if trace is None or evidence.died(start.place):
        return failed_start(evidence, compared, start.place)
    last = evidence.facts.size.steps
    first, *others = (
        Trace(losses={last: 0.0}, weights={last: trace.weights[last]}, bits=trace.bits)
        for trace in evidence.traces[start.place, MAIN]
    )
    between = (difference(first, other, evidence.exact) for other in others)
    found = worst([evidence.compare(trace), *between])
    return measured(compared, found, evidence.tolerance_of(MAIN))


ROW = TableRow(
    name="ranks", answer=_answer, training=ShortTraining(name=MAIN, saves=True, evaluates=True)
)
