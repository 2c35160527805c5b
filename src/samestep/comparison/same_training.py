"""Whether two runs are the same training: their losses by step, by epoch and on validation."""

from dataclasses import dataclass
from typing import Literal

from samestep.comparison.run_data import RunData
from samestep.run.records import Record

# What the order of sums alone changes, relative to the largest loss, by precision; correct code
# was measured to stay 10 times below it for hundreds of steps, missing synchronisation 1,000 above.
TOLERANCES = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}


@dataclass(frozen=True, kw_only=True)
class SameTraining:
    """How far a run is from the one it is held against, by the losses that both have recorded."""

    verdict: Literal["equal", "rounding", "apart", "unknown"]
    why: str = ""
    """Why nothing can be said, for `unknown`."""
    steps: int = 0
    epochs: int = 0
    """Epochs whose mean training loss both have recorded."""
    evaluations: int = 0
    """Evaluations on the validation set that both have recorded."""
    largest: float = 0.0
    """Largest difference of the loss."""
    largest_at: int = 0
    """The step of it."""
    largest_norm: float | None = None
    """Largest relative difference of the gradient norm, if both have it."""
    first_apart: int | None = None
    """The first step with a loss that differs by more than rounding."""
    last_alike: int | None = None
    """The last recorded step before it."""
    weights_sha256: str = ""
    """Of the weights after the last step for which both have recorded it, if it is the same."""
    weights_step: int | None = None
    """That step; None if there is none."""
    tolerance: float = 0.0
    """What rounding explains, relative to the largest loss."""


def compare_losses(one: RunData, other: RunData) -> SameTraining:
    """Compare the losses of equal steps, epochs and evaluations, and gradient norms of steps."""
    if not one.plan or not other.plan:
        return SameTraining(verdict="unknown", why="one of them has no start record")
    sizes = {"num_samples": "training samples", "global_batch_size": "samples a step"}
    for name, what in sizes.items():
        mine, its = one.plan[name], other.plan[name]
        if mine != its:
            its, mine = ("a stream" if n is None else f"{n:,}" for n in (its, mine))
            why = f"{its} {what} against {mine}, so equal steps are other work"
            return SameTraining(verdict="unknown", why=why)
    ours, theirs = _losses(one), _losses(other)
    both = sorted((key for key in ours if key in theirs), key=lambda key: key[1])
    if not both:
        why = "no step, epoch or evaluation is recorded in both (--log-every)"
        return SameTraining(verdict="unknown", why=why)
    tolerance = max(_tolerance(one), _tolerance(other))
    pairs = [(ours[key], theirs[key]) for key in both]
    gaps = [(abs(a["loss"] - b["loss"]), a["step"]) for a, b in pairs]
    # Rounding is of the sums that a loss is made of: where it falls to nothing, they do not.
    scale = max(abs(a["loss"]) for a, _ in pairs)
    largest, at = max(gaps, key=lambda gap: gap[0])
    far = [step for gap, step in gaps if gap > tolerance * scale]
    norms = [(a.get("grad_norm"), b.get("grad_norm")) for a, b in pairs]
    apart = [abs(a - b) / max(abs(a), 1e-12) for a, b in norms if a is not None and b is not None]
    before = [step for _, step in gaps if not far or step < far[0]]
    kinds = [kind for kind, _ in both]
    weighed = max(one.weights.keys() & other.weights.keys(), default=None)
    digests = set() if weighed is None else {one.weights[weighed], other.weights[weighed]}
    differ = largest or any(apart) or len(digests) > 1
    return SameTraining(
        verdict="apart" if far else "rounding" if differ else "equal",
        weights_sha256=digests.pop() if len(digests) == 1 else "",
        weights_step=weighed,
        steps=kinds.count("step"),
        epochs=kinds.count("epoch"),
        evaluations=kinds.count("evaluation"),
        largest=largest,
        largest_at=at,
        largest_norm=max(apart, default=None),
        first_apart=far[0] if far else None,
        last_alike=before[-1] if before else None,
        tolerance=tolerance,
    )


def _losses(run: RunData) -> dict[tuple[str, int], Record]:
    """Return the records that have a loss of this training, by their kind and step.

    The test is of the best checkpoint, wherever that was.
    """
    return {
        (kind, record["step"]): record
        for kind in ("step", "epoch", "evaluation")
        for record in run.of(kind)
        if record.get("split", "validation") == "validation"
        and isinstance(record.get("loss"), int | float)
    }


def _tolerance(run: RunData) -> float:
    return TOLERANCES.get(str(run.plan.get("precision", "fp32")), 1e-5)
