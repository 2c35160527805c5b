"""Differences between two trainings: how large, and where they begin."""

import math

import numpy as np
import pytest

from samestep.verification import trace as traces
from samestep.verification.trace import Trace, Values, difference, evaluations_apart, relative


def values(*numbers: float) -> Values:
    """Return a norm and its values, as a trace keeps them."""
    return np.array([np.linalg.norm(numbers), *numbers])


def trace(steps: int = 3, **more: Values) -> Trace:
    gradients = {"first": values(1.0, -2.0), "second": values(0.5), **more}
    return Trace(
        losses={step: 1.0 / step for step in range(1, steps + 1)},
        norms=dict.fromkeys(range(1, steps + 1), 2.0),
        gradients={step: dict(gradients) for step in range(1, steps + 1)},
        weights={step: dict(gradients) for step in range(1, steps + 1)},
    )


def test_equal_trainings_have_no_difference_and_a_resumed_one_is_compared_over_its_own_steps():
    found = difference(trace(), trace(), 1e-12)
    assert (found.largest, found.first_step, found.first_parameter) == (0.0, None, None)
    resumed = trace()
    for table in (resumed.losses, resumed.norms, resumed.gradients, resumed.weights):
        del table[1]
    assert difference(trace(), resumed, 1e-12).largest == 0.0
    assert traces.worst([]).largest == 0.0


def test_the_first_step_and_in_it_the_first_parameter_are_named():
    other = trace()
    other.gradients[2]["second"] = values(0.5 + 1e-6)
    other.gradients[3]["first"] = values(5.0, -2.0)
    found = difference(trace(), other, 1e-9)
    assert (found.first_step, found.first_parameter, found.what) == (2, "second", "gradient")
    assert found.largest == pytest.approx(2.0)
    # A gradient counts relative to the largest of all, not to itself.
    tiny = trace(zero=values(1e-17))
    assert difference(tiny, trace(zero=values(-1e-17)), 1e-12).largest < 1e-16


def test_where_losses_alone_count_gradients_do_not_but_still_name_the_parameter():
    other = trace()
    other.gradients[1]["first"] = values(9.0, 9.0)
    assert difference(trace(), other, 1e-9, losses_only=True).largest == 0.0
    other.losses[1] = 1.5
    found = difference(trace(), other, 1e-9, losses_only=True)
    assert found.largest == pytest.approx(1 / 3)
    assert found.first_parameter == "first"
    other.gradients[1]["first"] = trace().gradients[1]["first"]
    found = difference(trace(), other, 1e-9)
    assert (found.first_step, found.first_parameter, found.what) == (1, None, "loss")


def test_a_step_or_a_parameter_that_only_one_has_is_an_infinite_difference():
    assert difference(trace(2), trace(3), 1e-9).largest == math.inf
    assert difference(trace(), trace(third=values(1.0)), 1e-9).largest == math.inf


def test_what_overflows_on_both_sides_alike_is_no_difference():
    one, other = (trace(bad=values(math.inf, math.nan)) for _ in range(2))
    assert difference(one, other, 1e-9).largest == 0.0
    other.gradients[1]["bad"] = values(1.0, math.nan)
    assert difference(one, other, 1e-9).largest == math.inf


def test_relative_differences_know_nan_infinity_and_zero():
    assert relative(2.0, 1.0) == 0.5
    assert relative(0.0, 0.0) == relative(math.nan, math.nan) == 0.0
    assert relative(1.0, math.nan) == relative(1.0, math.inf) == math.inf
    assert relative(1e-20, -1e-20) < 1e-7


def test_evaluations_name_the_value_that_differs_most():
    one, other = {"loss": 1.0, "accuracy": 0.5}, {"loss": 1.0, "accuracy": 0.25}
    assert evaluations_apart(one, other) == (0.5, "accuracy")
    assert evaluations_apart({"loss": 1.0}, {})[0] == math.inf
