"""Rules that one process can break too: gradients, losses and scalers."""

from collections import Counter
from collections.abc import Iterator

from samestep.checking.events import Event, RankSeen, Seen
from samestep.checking.findings import Found, NotSeen, rule

_FEW = 3  # steps
_SKIPS = 8  # in a row; a scaler's first guess may be wrong by some powers of 2


@rule(
    "SS704",
    "error",
    "Gradients add up from step to step",
    "Every step is taken with the sum of all gradients so far: the weights run away.",
    least_ranks=1,
)
def never_zeroes_gradients(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for gradients of the last step that the next backward pass adds to."""
    for optimizer, (rank, steps) in _by_optimizer(seen).items():
        left = [event for event in steps if event["left"]]
        if len(left) < _FEW or 3 * len(left) < 2 * (len(steps) - 1):
            continue
        backward = _backward_before(rank, left[0])
        yield Found(
            backward,
            f"in {len(left)} of {len(steps)} steps of {optimizer} the gradients of the step before "
            f"were still there when the backward pass began",
            f"+ optimizer.zero_grad()\n  {seen.line(backward)}",
        )


@rule(
    "SS705",
    "error",
    "Gradients are zeroed between backward and step",
    "The optimizer steps without any gradient: nothing is learnt.",
    least_ranks=1,
)
def zeroes_before_the_step(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for `zero_grad` as the last thing before a step."""
    for optimizer, (_, steps) in _by_optimizer(seen).items():
        lost = [event for event in steps if event["cleared"]]
        if len(lost) >= _FEW and 2 * len(lost) > len(steps):
            where = lost[0]["cleared"]
            yield Found(
                where,
                f"{len(lost)} of {len(steps)} steps of {optimizer} came after a zero_grad with no "
                f"backward pass between",
                f"Move `{seen.line(where)}` before the backward pass, or after the step.",
            )


@rule(
    "SS708",
    "error",
    "The loss is detached from the model",
    "The backward pass ends before it reaches the model's parameters: nothing is learnt.",
    least_ranks=1,
)
def loss_is_detached(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for losses whose graph has no parameters, and steps without gradients."""
    for optimizer, (rank, steps) in _by_optimizer(seen).items():
        reach = rank.of("reach")
        cut = [event for event in reach if not event["parameters"]]
        empty = [event for event in steps if event["missing"] == event["tensors"]]
        clears = any(event["cleared"] for event in steps)
        forward = any(event["grad"] for event in rank.of("forward"))
        if len(cut) == len(reach) >= _FEW <= len(empty) == len(steps) and forward and not clears:
            yield Found(
                reach[0].where,
                f"none of the {steps[0]['tensors']} tensors of {optimizer} had a gradient in "
                f"{len(steps)} steps: the graph of the loss holds {reach[0]['leaves']} leaves and "
                f"none of them is a parameter",
                "Call backward on the loss as the model's output gave it, without `detach`, "
                "`item`, `numpy` or a new `torch.tensor` in between.",
            )


@rule(
    "SS710",
    "error",
    "The gradient scaler skips every step",
    "With infinite or NaN gradients the optimizer is never called: nothing is learnt.",
    least_ranks=1,
)
def scaler_skips_every_step(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for a scaler that skipped more steps in a row than finding its scale takes."""
    for rank in seen.ranks:
        calls = rank.of("scaler")
        taken = [n for n, event in enumerate(calls) if not event["skipped"]]
        row = calls[taken[-1] + 1 if taken else 0 :]
        if len(row) >= _SKIPS:
            yield Found(
                row[0].where,
                f"the last {len(row)} of {len(calls)} steps were skipped on rank {rank.rank}; the "
                f"scale fell to {row[-1]['scale']:g}",
                "Find where the loss or a gradient becomes infinite: "
                "`torch.autograd.set_detect_anomaly(True)`.",
            )
            return


def _by_optimizer(seen: Seen) -> dict[str, tuple[RankSeen, list[Event]]]:
    """Return the steps of each optimizer on the first rank that took any."""
    for rank in seen.ranks:
        found: dict[int, list[Event]] = {}
        for event in rank.of("gradients"):
            found.setdefault(event["optimizer_id"], []).append(event)
        if found:
            names = Counter(steps[0]["optimizer"] for steps in found.values())
            many = {name for name, count in names.items() if count > 1}
            return {
                f"{steps[0]['optimizer']} ({steps[0].where})"
                if steps[0]["optimizer"] in many
                else steps[0]["optimizer"]: (rank, steps)
                for steps in found.values()
            }
    return {}


def _backward_before(rank: RankSeen, step: Event) -> str:
    """Return the line of the first backward pass that a step was taken with."""
    lines: list[str] = []
    for event in rank.events:
        if event is step:
            break
        if event.kind == "gradients" and event["optimizer_id"] == step["optimizer_id"]:
            lines = []
        elif event.kind == "backward":
            lines.append(event.where)
    return lines[0] if lines else step.where
