"""A row for each thing that may make ranks differ: whether this recipe does it."""

from samestep.recipe import Accepted
from samestep.screen.words import count
from samestep.verification import causes
from samestep.verification.causes import Cause
from samestep.verification.difference import Difference, same_samples
from samestep.verification.evidence import Check, Evidence, Status
from samestep.verification.randomness import Kind
from samestep.verification.situations import FREE, MAIN, Start


def cause_checks(evidence: Evidence) -> list[Check]:
    """Return the rows of the causes that are looked for in every recipe."""
    return [
        _batchnorm(evidence),
        _dropout(evidence),
        _order(evidence),
        _augmentation(evidence),
        _loss(evidence),
        _last_batch(evidence),
        _unused(evidence),
        _state(evidence),
        _mixing(evidence),
    ]


def _found(evidence: Evidence, name: str, compared: str, cause: Cause, **more: object) -> Check:
    """Return a row for a cause that was found; with a tolerance of the user's the losses decide."""
    status: Status = "different" if evidence.tolerance is None else "note"
    return Check(
        name=name,
        status=status,
        compared=compared,
        cause=cause.name,
        why=cause.why,
        advice=cause.advice,
        **more,  # type: ignore[arg-type]
    )


def _left_free(evidence: Evidence, kind: Kind) -> tuple[Difference, int] | None:
    """Return how far ranks are apart when one kind of draw is not held still, and which size."""
    name = FREE if len(evidence.facts.present) == 1 else f"{FREE}: {kind}"
    one, many = evidence.trace(0, name), evidence.trace(1, name)
    if one is None or many is None:
        return None
    return evidence.compare(one, many, name), evidence.starts[1].world_size


def _by_intent(
    evidence: Evidence, kind: Kind, name: str, what: str, cause: Cause, accepted: Accepted | None
) -> Check:
    """Return the row of what differs with the number of ranks by itself."""
    free = _left_free(evidence, kind)
    if free is None:
        why = evidence.uncompared() or "the ranks did not come so far"
        return Check(name=name, status="skipped", compared=f"{what}; {why}")
    found, size = free
    tolerance = evidence.tolerance_of(MAIN)
    compared = f"{what}, on {size} ranks"
    if found.largest <= tolerance:
        return Check(
            name=name,
            status="same",
            compared=compared,
            tolerance=tolerance,
            difference=found.largest,
        )
    taken = accepted is not None and accepted in evidence.accepts
    return Check(
        name=name,
        status="accepted" if taken else "different",
        compared=compared,
        tolerance=tolerance,
        difference=found.largest,
        first_step=found.first_step,
        first_parameter=found.first_parameter,
        cause=cause.name,
        why=cause.why,
        advice="" if taken else cause.advice,
    )


def _batchnorm(evidence: Evidence) -> Check:
    names = evidence.facts.batchnorm
    if not names:
        return Check(name="BatchNorm", status="same", compared="the model has none")
    shown = "Layer " + (names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more")
    cause = Cause(
        causes.BATCHNORM,
        f"{shown}: each rank normalises over its own share of the batch; frozen, they make no "
        "difference.",
        "GroupNorm needs no batch; --sync-batchnorm works on NVIDIA GPUs; or accept it: --accept "
        'batchnorm, in the recipe accepts=("batchnorm",).',
    )
    what = f"{len(names)} layers as they are" if len(names) > 1 else "1 layer as it is"
    return _by_intent(evidence, "batchnorm", "BatchNorm", what, cause, "batchnorm")


def _dropout(evidence: Evidence) -> Check:
    draws = evidence.facts.draws
    if not draws:
        return Check(name="dropout", status="same", compared="the model draws nothing from torch")
    lines = sorted({line for line in draws.values() if line})
    where = f" ({', '.join(lines[:3])})" if lines else ""
    cause = Cause(
        causes.DROPOUT,
        f"The model draws from torch{where}, on each rank other numbers, since each holds other "
        "samples; with the draws held still the difference is gone.",
        'It is by intent? Accept it: --accept dropout, in the recipe accepts=("dropout",); or '
        "compare losses alone, up to --tolerance 0.1. Else set its probability to 0.",
    )
    return _by_intent(evidence, "dropout", "dropout", "draws as they are", cause, "dropout")


def _state(evidence: Evidence) -> Check:
    facts, name = evidence.facts, "state"
    if facts.remembers is not None:
        compared = "a second forward gives the same"
        return _found(
            evidence,
            name,
            compared,
            causes.remembering(*facts.remembers),
            difference=facts.remembers[1],
            tolerance=evidence.exact,
        )
    if facts.own_generators:
        compared = "no generator that goes on by itself"
        return _found(evidence, name, compared, causes.own_generator(facts.own_generators))
    if facts.generators:
        cause = causes.generators(facts.generators)
        return _by_intent(evidence, "state", name, "draws as they are", cause, None)
    compared = "a second forward gives the same"
    return Check(name=name, status="same", compared=compared)


def _order(evidence: Evidence) -> Check:
    name, facts = "order", evidence.facts
    epoch = "on all ranks that of one process"
    if causes.other_data(evidence):
        return _found(evidence, name, "the same data in every process", causes.order())
    if facts.unsteady:
        return Check(name=name, status="skipped", compared="samples change when they are read")
    if evidence.uncompared():
        return Check(name=name, status="skipped", compared=evidence.uncompared())
    for start in evidence.middle:
        for step, alike in _shared_out(evidence, start).items():
            if not alike:
                return _found(evidence, name, epoch, causes.order(), first_step=step)
    return Check(name=name, status="same", compared=epoch)


def _shared_out(evidence: Evidence, start: Start) -> dict[int, bool]:
    """Return for each step whether the ranks' shares are the samples of one process, in order."""
    reference, traces = evidence.reference, evidence.traces.get((start.place, MAIN), [])
    assert reference is not None
    if not traces:
        return {}
    return {
        step: same_samples(marks, [trace.samples.get(step, []) for trace in traces])
        for step, marks in reference.samples.items()
    }


def _augmentation(evidence: Evidence) -> Check:
    facts = evidence.facts
    compared = "a sample read again, in other batches"
    if facts.unsteady:
        cause = causes.augmentation(facts.unsteady, batchwise=facts.batchwise)
        return _found(evidence, "augmentation", compared, cause)
    return Check(name="augmentation", status="same", compared=compared)


def _loss(evidence: Evidence) -> Check:
    found, tolerance = evidence.facts.loss, evidence.exact
    compared = "of a batch, and of its parts"
    if found is None:
        return Check(name="loss", status="skipped", compared="outputs are not one a sample")
    if found.full > tolerance:
        return _found(
            evidence,
            "loss",
            compared,
            causes.loss(adds_up=found.adds_up),
            difference=found.full,
            tolerance=tolerance,
        )
    return Check(
        name="loss", status="same", compared=compared, difference=found.full, tolerance=tolerance
    )


def _last_batch(evidence: Evidence) -> Check:
    facts, tolerance, name = evidence.facts, evidence.exact, "last batch"
    cut, loss = facts.cut, facts.loss
    if cut.uneven_step is None:
        return Check(name=name, status="skipped", compared="--drop-last leaves none")
    compared = f"{count(cut.rest, 'sample')} in step {cut.uneven_step}"
    if cut.rest in facts.failed_sizes:
        why = f"it fails: {facts.failed_sizes[cut.rest]}"
        return _found(evidence, name, compared, causes.last_batch(cut.rest, why))
    if loss is not None and loss.full <= tolerance < loss.uneven:
        cause = causes.last_batch(cut.rest, "its loss is no longer the mean over its samples")
        return _found(
            evidence,
            name,
            compared,
            cause,
            difference=loss.uneven,
            tolerance=tolerance,
            first_step=cut.uneven_step,
        )
    if 1 in facts.failed_sizes:
        return Check(
            name=name,
            status="note",
            compared="a batch of one sample, as the last may be",
            cause=causes.LAST_BATCH,
            why=f"It fails: {facts.failed_sizes[1]}.",
            advice="Choose sizes that never leave one sample, or --drop-last.",
        )
    compared = f"{compared}, and 1 alone"
    if loss is None:
        return Check(name=name, status="same", compared=compared)
    # A loss that is no mean in a full batch says nothing of this one.
    bent = loss.full > tolerance
    return Check(
        name=name,
        status="skipped" if bent else "same",
        compared="the loss is bent in full batches too" if bent else compared,
        difference=None if bent else loss.uneven,
        tolerance=None if bent else tolerance,
    )


def _unused(evidence: Evidence) -> Check:
    names = evidence.facts.unused
    compared = "every parameter gets a gradient"
    if names:
        return _found(
            evidence, "parameters", compared, causes.unused(names), first_parameter=names[0]
        )
    return Check(name="parameters", status="same", compared=compared)


def _mixing(evidence: Evidence) -> Check:
    found = evidence.facts.mixes
    compared = "outputs, with others in the batch"
    if found is not None:
        return _found(
            evidence,
            "samples apart",
            compared,
            causes.mixing(*found),
            difference=found[1],
            tolerance=evidence.exact,
        )
    return Check(name="samples apart", status="same", compared=compared)
