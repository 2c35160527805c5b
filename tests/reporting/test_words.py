"""Columns, sparklines and curves of characters."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.reporting.words import BOTH, FIRST, LABEL, SECOND, Columns, curve_lines, sparkline


def test_numbers_of_a_column_have_their_points_below_each_other():
    rows = [{"row": 1, "price": 331.556, "word": "a"}, {"row": 10, "price": 5.0, "word": None}]
    lines = list(Columns().lines(rows, heading=True))
    assert [line.split() for line in lines] == [
        ["row", "price", "word"],
        ["1", "331.556", "a"],
        ["10", "5.000", "-"],
    ]
    assert {line.find(".") for line in lines[1:]} == {lines[1].find(".")}
    assert len({len(line) for line in lines}) == 1


def test_a_later_block_is_as_wide_as_the_one_before_or_wider():
    columns = Columns()
    (first,) = columns.lines([{"price": 100.25}], heading=False)
    (second,) = columns.lines([{"price": 1.5}], heading=False)
    (third,) = columns.lines([{"price": 123456.0}], heading=False)
    assert (first, second) == ("100.25", "  1.50")
    assert third == "123456.00"


def test_what_is_no_usual_number_is_shown_as_it_is():
    rows = [{"x": 1e-9}, {"x": float("nan")}, {"x": 1e30}]
    shown = [line.strip() for line in Columns().lines(rows, heading=False)]
    assert shown == ["1e-09", "nan", "1e+30"]


@pytest.mark.parametrize(
    ("values", "drawn"),
    [
        ((), ""),
        ((1.0,), "▁"),
        ((2.0, 2.0), "▁▁"),
        ((8, 7, 6, 5, 4, 3, 2, 1), "█▇▆▅▄▃▂▁"),
        ((1.0, math.nan, 2.0, math.inf), "▁×█×"),
        ((math.nan, math.nan), "××"),
        ((1e308, -1e308, 1e308), "█▁█"),
        ((5e-324, 0.0), "█▁"),
    ],
)
def test_a_curve_has_a_character_for_each_value(values, drawn):
    assert sparkline(values) == drawn


@pytest.mark.parametrize("count", [12, 13, 30, 1000])
def test_more_values_than_columns_become_means(count):
    drawn = sparkline([float(count - n) for n in range(count)])
    assert len(drawn) == 12
    assert list(drawn) == sorted(drawn, reverse=True)
    assert (drawn[0], drawn[-1]) == ("█", "▁")


losses = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=500)


@given(losses, st.integers(10, 120), st.integers(1, 20))
def test_equal_curves_lie_on_each_other_within_the_width(values, width, height):
    lines = curve_lines(values, values, width, height)
    assert len(lines) == height
    drawn = "".join(line[LABEL:] for line in lines)
    assert {*drawn} <= {BOTH, " "}
    assert drawn.count(BOTH) == min(len(values), width - LABEL)


def test_where_the_curves_differ_each_is_alone():
    lines = curve_lines([0.0, 1.0, 1.0], [0.0, 1.0, 0.0], 40, 2)
    assert [line[LABEL:] for line in lines] == [f" {BOTH}{FIRST}", f"{BOTH} {SECOND}"]
    assert [line[:LABEL].strip() for line in lines] == ["1", "0"]
