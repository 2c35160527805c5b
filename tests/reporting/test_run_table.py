"""The table of runs fits any terminal, and holds whatever runs are called."""

import math
from datetime import datetime
from pathlib import Path

import pytest

from samestep.reporting.run_table import as_json, run_lines
from samestep.reporting.table import columns_of as cells
from samestep.run.summary import RunSummary


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


def test_on_80_columns_the_names_that_train_gives_are_whole():
    heading, line = run_lines([summary(NAMED)], 80)
    assert NAMED in line
    for part in ("completed", "accuracy 0.9967", "1:02:05", "█▂▁"):
        assert part in line
    assert "recipe" not in heading


def test_in_a_file_nothing_is_left_out_and_nothing_is_cut():
    heading, *lines = run_lines(ODD, None)
    assert " ".join(heading.split()) == "run recipe state best time began train loss last"
    assert len(lines) == len(ODD)
    assert "a" * 300 in lines[1]


def test_many_damaged_runs_are_counted_on_a_terminal_and_listed_elsewhere():
    damaged = [summary(f"run-{n}", state="damaged", reason="it is empty") for n in range(1234)]
    runs = [summary(NAMED), *damaged]
    *_, last = lines = list(run_lines(runs, 80))
    assert len(lines) == 3
    assert "1,234" in last
    assert len(list(run_lines(runs, None))) == 1 + 1235
    few = "\n".join(run_lines(runs[:3], 80))
    assert few.count("damaged") == 2
    assert few.count("it is empty") == 2


def test_a_loss_that_is_not_finite_is_seen_in_the_table_and_null_in_json():
    run = summary("run", losses=(1.0, math.nan), value=None)
    _, line = run_lines([run], 100)
    assert "▁×" in line
    assert "NaN" in line
    assert as_json(run)["losses"] == [1.0, None]


def test_when_a_run_began_is_iso_8601_or_null():
    assert datetime.fromisoformat(as_json(summary("run"))["started"]).timestamp() == 1.8e9
    for started in (None, 1e300, math.inf):
        assert as_json(summary("run", started=started))["started"] is None
