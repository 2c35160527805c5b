"""How far two trainings are from each other: the largest difference, and where it begins."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from samestep.settings import Precision
from samestep.verification.fingerprints import dense
from samestep.verification.trace import Trace

# Relative differences that rounding may cause in a few steps. Measured on the built-in recipes:
# 3e-16 to 1e-14 in float64, 2e-7 to 5e-4 of the loss in fp32. Gradients are another matter there:
# in a flat image many units lie within rounding of ReLU's kink, and change sides together.
ROUNDING: Mapping[Precision, float] = {"fp64": 1e-10, "fp32": 1e-2, "bf16": 1e-1, "fp16": 1e-1}

LEAST: Mapping[Precision, float] = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}
"""What counts as rounding of a loss at least, however little a rounding of the weights moves it."""

_LAST_BIT = 2.0**-52
"""The size of a difference in bits of values that were not kept."""


@dataclass(frozen=True)
class TrainingDifference:
    """Between two trainings."""

    largest: float = 0.0
    """Relative, over all that was compared; infinite where one of them has what the other lacks."""
    first_step: int | None = None
    """The first step with a difference beyond the tolerance."""
    first_parameter: str | None = None
    """In that step the first parameter, in the model's order, of which that holds."""
    what: str = ""
    """What of that step differs: the loss, the gradient norm, a gradient, a weight."""


def worst(differences: Iterable[TrainingDifference]) -> TrainingDifference:
    """Return the largest of some differences; none of none."""
    return max(differences, key=lambda d: d.largest, default=TrainingDifference())


def difference(
    one: Trace, other: Trace, tolerance: float, *, losses_only: bool = False
) -> TrainingDifference:
    """Compare two trainings step by step, over the steps that the second one took.

    Losses and norms are compared relative to the larger of both; each parameter's gradient relative
    to the largest entry of the whole gradient, each weight to the largest weight. (A gradient that
    is zero but for rounding has no scale of its own.) The first parameter that differs beyond the
    tolerance is named also where losses alone decide.
    """
    largest, first = 0.0, TrainingDifference()
    for step in sorted(other.losses):
        found = _in_step(one, other, step)
        decisive = found[:1] if losses_only else found
        largest = max([largest, *(size for _, _, size in decisive)])
        beyond = [(what, name) for what, name, size in found if size > tolerance]
        if first.first_step is None and any(size > tolerance for _, _, size in decisive):
            named = next((name for _, name in beyond if name), None)
            first = TrainingDifference(first_step=step, first_parameter=named, what=beyond[0][0])
    return replace(first, largest=largest)


Found = tuple[str, str, float]
"""What, which parameter if any, how much."""


def _in_step(one: Trace, other: Trace, step: int) -> list[Found]:
    """Return what was found in a step: its loss first, then in the order of the computation."""
    found = [("loss", "", relative(one.losses.get(step, math.nan), other.losses[step]))]
    if step in one.norms and step in other.norms:
        found.append(("gradient norm", "", relative(one.norms[step], other.norms[step])))
    found += _tensors("gradient", one.gradients.get(step), other.gradients.get(step))
    found += _tensors("weight", one.weights.get(step), other.weights.get(step))
    found += _bits(one.bits.get(step, {}), other.bits.get(step))
    epoch = other.epochs.get(step, {})
    for name, value in one.epochs.get(step, {}).items():
        found.append((f"{name} of the epoch", "", relative(value, epoch.get(name, math.nan))))
    return found


def _bits(one: Mapping[str, str], other: Mapping[str, str] | None) -> list[Found]:
    """Return the tensors whose bits differ: also where the values that were kept do not."""
    if other is None:
        return []
    differ = [name for name in one if one[name] != other.get(name)]
    return [(what, name, _LAST_BIT) for what, _, name in (name.partition(" ") for name in differ)]


def _tensors(
    what: str, one: Mapping[str, Tensor] | None, other: Mapping[str, Tensor] | None
) -> list[Found]:
    if one is None or other is None:
        return []  # Lightning's steps are not looked into
    largest = max((float(v[1:].abs().max()) for v in one.values()), default=0.0)
    norm = math.sqrt(sum(float(v[0]) ** 2 for v in one.values()))
    names = [*one, *(name for name in other if name not in one)]
    return [(what, n, _apart(one.get(n), other.get(n), norm, largest)) for n in names]


def _apart(one: Tensor | None, other: Tensor | None, norm: float, largest: float) -> float:
    """Return how far two tensors' norms and values are apart, relative to those of all tensors."""
    if one is None or other is None or one.shape != other.shape:
        return math.inf
    scale = torch.full_like(one, largest or 1.0)
    scale[0] = norm or 1.0
    differs = (one != other) & ~(one.isnan() & other.isnan())
    found = float(((one - other).abs() / scale)[differs].max()) if bool(differs.any()) else 0.0
    return found if math.isfinite(found) else math.inf


def relative(one: float, other: float) -> float:
    """Return the difference of two numbers relative to the larger; infinite if one is none."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    # What is no more than this is zero but for rounding, and has no scale of its own.
    return abs(one - other) / max(abs(one), abs(other), 1e-12)


def largest_apart(one: Tensor, other: Tensor) -> float:
    """Return how far two tensors of one shape are apart, relative to the first's largest entry."""
    if not (one.is_floating_point() and one.numel()):
        return 0.0
    one, other = dense(one).double(), dense(other).double()
    return float((one - other).abs().max() / one.abs().max().clamp(min=1e-12))


def evaluations_apart(one: Mapping[str, float], other: Mapping[str, float]) -> tuple[float, str]:
    """Return the largest relative difference of two evaluations, and of which value."""
    found = [(relative(one[name], other.get(name, math.nan)), name) for name in one]
    return max(found, default=(0.0, ""))
