"""Columns, sparklines and curves of characters; the table of a folder's runs."""

import math
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.reporting.run_table import as_json, run_lines
from samestep.reporting.table import columns_of as cells
from samestep.reporting.words import BOTH, FIRST, LABEL, SECOND, Columns, curve_lines, sparkline
from samestep.run.summary import RunSummary


def test_numbers_of_a_column_stand_below_each_other_also_in_later_blocks():
    rows = [{"row": 1, "price": 331.556, "word": "a"}, {"row": 10, "price": 5.0, "word": None}]
    lines = list(Columns().lines(rows, heading=True))
    assert [line.split() for line in lines] == [
        ["row", "price", "word"],
        ["1", "331.556", "a"],
        ["10", "5.000", "-"],
    ]
    assert {line.find(".") for line in lines[1:]} == {lines[1].find(".")}
    assert len({len(line) for line in lines}) == 1
    columns = Columns()
    (first,) = columns.lines([{"price": 100.25}], heading=False)
    (second,) = columns.lines([{"price": 1.5}], heading=False)
    (third,) = columns.lines([{"price": 123456.0}], heading=False)
    assert (first, second) == ("100.25", "  1.50")
    assert third == "123456.00"
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


def summary(name, **more):
    table = {"recipe": "spiral", "state": "completed", "metric": "accuracy", "mode": "max"}
    table |= {"value": 0.99671, "seconds": 3725.0, "started": 1.8e9, "losses": (3.0, 1.2, 1.0)}
    return RunSummary(name=name, run_dir=Path("runs") / name, **{**table, **more})


NAMED = "spiral-20261123-075915-16c7"
ODD = [
    summary(NAMED),
    summary("a" * 300, recipe="r" * 200),
    summary("数据" * 60, metric="度" * 50),
    summary("two\nlines\x1b[2J", metric="a\tb"),
    summary("\udcff\udcfe", recipe="\udcff"),
    summary("e\u0301" * 100),
    summary("damaged", state="damaged", metric=None, seconds=None, losses=(), started=None),
]


@pytest.mark.parametrize("width", [1, 20, 60, 80, 100, 300])
def test_no_line_is_wider_than_the_terminal(width):
    runs = [run for run in ODD if run.state != "damaged"]
    lines = list(run_lines(runs, width))
    assert len(lines) == 1 + len(runs)
    for line in lines:
        assert cells(line) <= max(width, 12), "the name and the state stay"
        assert line.isprintable()
        line.encode()


def test_many_damaged_runs_are_counted_names_are_whole_and_in_a_file_nothing_is_cut():
    damaged = [summary(f"run-{n}", state="damaged", reason="it is empty") for n in range(1234)]
    runs = [summary(NAMED), *damaged]
    *_, last = lines = list(run_lines(runs, 80))
    assert len(lines) == 3
    assert "1,234" in last
    assert len(list(run_lines(runs, None))) == 1 + 1235
    few = "\n".join(run_lines(runs[:3], 80))
    assert few.count("damaged") == 2
    assert few.count("it is empty") == 2
    heading, line = run_lines([summary(NAMED)], 80)
    assert NAMED in line
    for part in ("completed", "accuracy 0.9967", "1:02:05", "█▂▁"):
        assert part in line
    assert "recipe" not in heading
    heading, *lines = run_lines(ODD, None)
    assert " ".join(heading.split()) == "run recipe state best time began train loss last"
    assert len(lines) == len(ODD)
    assert "a" * 300 in lines[1]


def test_a_loss_that_is_not_finite_and_a_time_that_is_none_are_null_in_json():
    run = summary("run", losses=(1.0, math.nan), value=None)
    _, line = run_lines([run], 100)
    assert "▁×" in line
    assert "NaN" in line
    assert as_json(run)["losses"] == [1.0, None]
    assert datetime.fromisoformat(as_json(summary("run"))["started"]).timestamp() == 1.8e9
    for started in (None, 1e300, math.inf):
        assert as_json(summary("run", started=started))["started"] is None
