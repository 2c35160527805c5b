"""How far apart two trainings are, and where the difference begins."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from samestep.settings import Precision
from samestep.verification.trace import Trace, Values, dense

# Relative differences that rounding may cause in a few steps. Measured on the built-in recipes:
# 3e-16 to 1e-14 in float64, 2e-7 to 5e-4 of the loss in fp32. Gradients differ more in fp32: in a
# flat image many units lie within rounding of ReLU's kink, and change sides together.
ROUNDING: Mapping[Precision, float] = {"fp64": 1e-10, "fp32": 1e-2, "bf16": 1e-1, "fp16": 1e-1}

LEAST: Mapping[Precision, float] = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}
"""The smallest tolerance of a loss, even if a rounding of the weights moves it less."""

_LAST_BIT = 2.0**-52
"""Reported for a difference in bits of which the values were not kept."""


@dataclass(frozen=True)
class TrainingDifference:
    """How two trainings differ."""

    largest: float = 0.0
    """Relative, over everything compared; infinite where only one of them has a value."""
    first_step: int | None = None
    """The first step with a difference beyond the tolerance."""
    first_parameter: str | None = None
    """The first parameter, in the model's order, beyond the tolerance in that step."""
    what: str = ""
    """What differs in that step: the loss, the gradient norm, a gradient, a weight."""


def worst(differences: Iterable[TrainingDifference]) -> TrainingDifference:
    """Return the largest of some differences."""
    return max(differences, key=lambda d: d.largest, default=TrainingDifference())


def difference(
    one: Trace, other: Trace, tolerance: float, *, losses_only: bool = False
) -> TrainingDifference:
    """Compare two trainings step by step, over the steps that the second one took.

    Losses and norms are relative to the larger of both; each gradient or weight to the largest
    entry of all, as one that is zero but for rounding has no scale of its own. The first parameter
    beyond the tolerance is named also where losses alone decide.
    """
    largest, first = 0.0, TrainingDifference()
    for step in sorted(other.losses):
        found = _in_step(one, other, step)
        decisive = [size for _, _, size in (found[:1] if losses_only else found)]
        largest = max(largest, *decisive)
        if first.first_step is None and any(size > tolerance for size in decisive):
            beyond = [(what, name) for what, name, size in found if size > tolerance]
            named = next((name for _, name in beyond if name), None)
            first = TrainingDifference(first_step=step, first_parameter=named, what=beyond[0][0])
    return replace(first, largest=largest)


def _in_step(one: Trace, other: Trace, step: int) -> list[tuple[str, str, float]]:
    """Return what differs, in which parameter, and how much: the loss first."""
    found = [("loss", "", relative(one.losses.get(step, math.nan), other.losses[step]))]
    if step in one.norms and step in other.norms:
        found.append(("gradient norm", "", relative(one.norms[step], other.norms[step])))
    found += _tensors("gradient", one.gradients.get(step), other.gradients.get(step))
    found += _tensors("weight", one.weights.get(step), other.weights.get(step))
    if step in other.bits:
        for name, bits in one.bits.get(step, {}).items():
            if bits != other.bits[step].get(name):
                what, _, parameter = name.partition(" ")
                found.append((what, parameter, _LAST_BIT))
    epoch = other.epochs.get(step, {})
    for name, value in one.epochs.get(step, {}).items():
        found.append((f"{name} of the epoch", "", relative(value, epoch.get(name, math.nan))))
    return found


def _tensors(
    what: str, one: Mapping[str, Values] | None, other: Mapping[str, Values] | None
) -> list[tuple[str, str, float]]:
    if one is None or other is None:
        return []  # Lightning's steps are not looked into
    largest = max((float(np.abs(v[1:]).max()) for v in one.values()), default=0.0)
    norm = math.hypot(*(float(v[0]) for v in one.values()))
    return [(what, n, _apart(one.get(n), other.get(n), norm, largest)) for n in {**one, **other}]


def _apart(one: Values | None, other: Values | None, norm: float, largest: float) -> float:
    """Compare two tensors' norms and values, relative to those of all tensors."""
    if one is None or other is None or one.shape != other.shape:
        return math.inf
    differs = (one != other) & ~(np.isnan(one) & np.isnan(other))
    if not differs.any():
        return 0.0
    scale = np.full_like(one, largest or 1.0)
    scale[0] = norm or 1.0
    with np.errstate(invalid="ignore", over="ignore"):
        found = float((np.abs(one - other) / scale)[differs].max())
    return found if math.isfinite(found) else math.inf


def relative(one: float, other: float) -> float:
    """Return the difference of two numbers relative to the larger; infinite if one is."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    # Below 1e-12 both are zero but for rounding, and have no scale of their own.
    return abs(one - other) / max(abs(one), abs(other), 1e-12)


def largest_apart(one: Tensor, other: Tensor) -> float:
    """Return how far apart two tensors of one shape are, relative to the first's largest entry."""
    if not (one.is_floating_point() and one.numel()):
        return 0.0
    one, other = dense(one).double(), dense(other).double()
    return float((one - other).abs().max() / one.abs().max().clamp(min=1e-12))


def evaluations_apart(one: Mapping[str, float], other: Mapping[str, float]) -> tuple[float, str]:
    """Return the largest relative difference of two evaluations, and the name of that value."""
    found = [(relative(one[name], other.get(name, math.nan)), name) for name in one]
    return max(found, default=(0.0, ""))
