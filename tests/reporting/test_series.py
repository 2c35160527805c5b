"""Curves are thinned, and lose no peak and no gap."""

import math

import numpy as np

from samestep.reporting.charts import MOST_POINTS, grouped_means, make_curve


def test_a_short_curve_stays_as_it_is():
    curve = make_curve("loss", "steps", 0, [1, 2, 3], [0.5, 0.25, 0.125])
    assert (curve.x, curve.y, curve.gaps) == ((1, 2, 3), (0.5, 0.25, 0.125), 0)


def test_of_a_long_curve_every_peak_stays_and_it_has_at_most_two_thousand_points():
    values = np.sin(np.arange(300_000) / 5000)
    values[123_456], values[234_567] = 40.0, -30.0
    curve = make_curve("loss", "steps", 0, np.arange(300_000), values)
    assert len(curve.x) <= MOST_POINTS
    assert dict(zip(curve.x, curve.y, strict=True))[123_456] == 40.0
    assert dict(zip(curve.x, curve.y, strict=True))[234_567] == -30.0
    assert (curve.x[0], curve.x[-1]) == (0, 299_999)
    assert curve.summary[1:3] == (-30.0, 40.0)
    assert list(curve.x) == sorted(curve.x)


def test_values_that_are_not_finite_are_gaps_also_where_the_curve_is_thinned():
    values = [1.0, None, math.nan, math.inf, 2.0]
    curve = make_curve("loss", "steps", 0, range(5), values)
    assert curve.y == (1.0, None, None, None, 2.0)
    assert curve.gaps == 3
    assert curve.summary == (1.0, 1.0, 2.0, 2.0)
    long = np.ones(50_000)
    long[20_000:30_000] = math.nan
    thinned = make_curve("loss", "steps", 0, np.arange(50_000), long)
    assert None in thinned.y
    assert thinned.gaps == 10_000


def test_a_curve_without_a_single_number_is_none():
    assert make_curve("loss", "steps", 0, [1, 2], [None, math.nan]) is None


def test_parts_are_thinned_together_so_that_they_still_add_up():
    rows = np.random.default_rng(0).random((5000, 3))
    means, last = grouped_means(rows, most=100)
    assert means.shape == (100, 3)
    assert last[-1] == 4999
    assert np.allclose(means.mean(axis=0), rows.mean(axis=0))
