"""Why ranks differ, in words: what the experiments found, and what to do about it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from samestep.screen.words import count
from samestep.verification.difference import Difference
from samestep.verification.evidence import Evidence
from samestep.verification.messages import Failure

BATCHNORM = "BatchNorm statistics per rank"
DROPOUT = "dropout"
AUGMENTATION = "unkeyed augmentation"
LOSS = "loss that is not a mean over samples"
METRIC = "metric averaged over ranks"
ORDER = "order"
UNUSED = "unused parameters"
STATE = "state outside the module"
LAST_BATCH = "the last uneven batch"
MIXING = "samples that see each other"
UNKNOWN = "unknown"

_UNUSED = re.compile(
    r"does not depend on|finished reduction in the prior iteration|find_unused_parameters"
)
_OTHER_SIZES = re.compile(r"loaded data of different sizes")


@dataclass(frozen=True)
class Cause:
    """A likely cause, how it was found, and what to do."""

    name: str
    why: str
    advice: str


def likely(evidence: Evidence, found: Difference) -> Cause:
    """Return the cause of a difference that is left when all draws are held still."""
    return next(_candidates(evidence, found))


def _candidates(evidence: Evidence, found: Difference) -> Iterator[Cause]:
    """Yield what the experiments found, the decisive first; at last that they found nothing."""
    facts, rounding = evidence.facts, evidence.exact
    if other_data(evidence):
        yield order()
    if facts.unsteady:
        yield augmentation(facts.unsteady, batchwise=facts.batchwise)
    if facts.loss is not None and facts.loss.full > rounding:
        yield loss(adds_up=facts.loss.adds_up)
    if facts.loss is not None and facts.loss.uneven > rounding:
        yield last_batch(facts.cut.rest, "its loss is no longer the mean over its samples")
    if facts.mixes is not None:
        yield mixing(*facts.mixes)
    if facts.remembers is not None:
        yield remembering(*facts.remembers)
    first = [f"step {found.first_step}"] if found.first_step else []
    first += [part for part in (found.what, found.first_parameter) if part]
    yield Cause(
        UNKNOWN,
        f"None of the known causes was found. What differs first: {', '.join(first)}.",
        "Look for what depends on the rank, on how many samples a rank holds, or on what ran "
        "before.",
    )


def other_data(evidence: Evidence) -> bool:
    """Whether processes hold other samples in the same places."""
    told = [rank for ranks in evidence.told.values() for rank in ranks if rank.num_samples]
    if evidence.facts.unsteady == "dataset":
        return len({rank.num_samples for rank in told}) > 1
    return len({(rank.num_samples, *rank.marks) for rank in told}) > 1


def of_failure(evidence: Evidence, failure: Failure | None, message: str) -> Cause | None:
    """Return the cause of a failure, where its message or its step tells."""
    if _UNUSED.search(message):
        return unused(evidence.facts.unused)
    if _OTHER_SIZES.search(message):
        return order()
    cut = evidence.facts.cut
    at_uneven = failure is not None and failure.step == cut.uneven_step
    if at_uneven or cut.rest in evidence.facts.failed_sizes:
        full = cut.global_batch
        return last_batch(cut.rest, f"it fails with {count(cut.rest, 'sample')}, {full} work")
    return None


def order() -> Cause:
    """Samples in other places."""
    return Cause(
        ORDER,
        "Processes hold other samples in the same places: data() returns them in another order, "
        "or others, each time it is called.",
        "Sort what comes from a folder or a set, and give each generator in data() a fixed seed.",
    )


def augmentation(part: str, *, batchwise: bool) -> Cause:
    """Samples that change with the rank."""
    reader = {"dataset": "The data set", "transform": "transform()", "augment": "augment()"}[part]
    if batchwise:
        why = f"{reader} gives a sample something else when other samples are beside it."
    else:
        why = f"{reader} gives something else each time the same sample is read in the same epoch."
    advice = {
        "dataset": "Draw in __getitem__ from torch, random or np.random themselves, not from a "
        "generator of your own: samestep seeds those by (seed, epoch, sample).",
        "transform": "transform() must not draw; move what is random to augment() and draw from "
        "its keys: samestep.uniform(keys, draws).",
        "augment": "Draw from the keys that augment() is given: samestep.uniform(keys, draws), one "
        "row a sample.",
    }[part]
    return Cause(AUGMENTATION, why, advice)


def loss(*, adds_up: bool) -> Cause:
    """A loss that is bent by uneven shares."""
    why = (
        "The loss of a batch is the sum of its parts' losses: a sum, or divided by a fixed number."
        if adds_up
        else "The loss of a batch is not the mean of its parts' losses by their numbers of "
        "samples: it is weighted (class weights, ignored targets), or made over the whole batch."
    )
    return Cause(
        LOSS,
        why,
        "Return a mean in which each of the n samples weighs 1/n. With class weights: "
        'cross_entropy(…, weight=w, reduction="sum") / len(targets).',
    )


def metric(name: str, *, across: bool) -> Cause:
    """A metric that is bent by uneven shares."""
    why = (
        f"{name} of a rank's samples changes with what the other ranks measure at that time: it is "
        "averaged over ranks inside the metric."
        if across
        else f"{name} of a sample depends on the others of its batch: it is made over the batch, "
        "and ranks have other batches."
    )
    return Cause(
        METRIC,
        why,
        "Return one value a sample, of this rank alone; sums and counts are added up over ranks "
        "and divided once.",
    )


def unused(names: tuple[str, ...]) -> Cause:
    """Parameters that no gradient comes to."""
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    why = (
        f"The loss does not depend on {shown}, so ranks would wait for a gradient that never comes."
        if names
        else "In some steps the loss does not depend on all parameters, so ranks wait for a "
        "gradient that never comes."
    )
    return Cause(
        UNUSED, why, "Use them in forward in every step, or freeze them: requires_grad_(False)."
    )


def generators(found: dict[str, str]) -> Cause:
    """Draws from Python or NumPy."""
    names = " and ".join(sorted(found))
    return Cause(
        STATE,
        f"The model or the loss draws from {names}, which stands elsewhere on every rank and after "
        "a stop; with it held still the difference is gone.",
        "Draw from torch, which is seeded in every step, or from what all ranks have alike, such "
        "as the weights or the inputs.",
    )


def own_generator(lines: tuple[str, ...]) -> Cause:
    """Draws from a generator of torch that is the user's own."""
    where = f" ({', '.join(line for line in lines if line)})" if any(lines) else ""
    return Cause(
        STATE,
        f"The model or the loss draws from a torch.Generator of its own{where}, which goes on from "
        "step to step: no checkpoint holds it, so a resumed run draws other numbers, and each rank "
        "has one.",
        "Draw without generator=: torch's own is seeded in every step.",
    )


def remembering(module: str, difference: float) -> Cause:
    """State that is neither a parameter nor a buffer."""
    return Cause(
        STATE,
        f"{module} gives something else ({difference:.0e}) in a second forward with equal weights, "
        "buffers and inputs: it keeps a number, or a generator, that is neither.",
        "Keep it with register_buffer(), so that checkpoints hold it, and change it once a step.",
    )


def last_batch(rest: int, why: str) -> Cause:
    """What works with full batches alone."""
    return Cause(
        LAST_BATCH,
        f"The last batch of an epoch has {count(rest, 'sample')} here: {why}.",
        "Take the number of samples from the batch (len(inputs)), or leave the last one out: "
        "--drop-last.",
    )


def mixing(module: str, difference: float) -> Cause:
    """A model that computes over the batch."""
    return Cause(
        MIXING,
        f"{module} gives a sample something else ({difference:.0e}) when other samples are beside "
        "it: it computes over the batch, and each rank has its own.",
        "Compute over a sample's own values (GroupNorm, LayerNorm), or over all ranks.",
    )
