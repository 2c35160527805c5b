"""Rows as columns, block by block."""

from samestep.reporting.words import Columns


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
    assert [line.strip() for line in Columns().lines(rows, heading=False)] == [
        "1e-09",
        "nan",
        "1e+30",
    ]
