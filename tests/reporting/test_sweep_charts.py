"""The picture of a sweep: where each run's best value stands for each setting that varies."""

import json
import math

import pytest

from samestep import UserError
from samestep.reporting.collect import collect
from samestep.reporting.page import render
from tests.reporting.made_runs import write_run

BEST = {("1e-3", "16"): 0.5, ("1e-2", "16"): 0.9, ("1e-1", "16"): 0.7, ("1e-3", "8"): 0.6}


@pytest.fixture
def sweep(tmp_path):
    folder, points = tmp_path / "sweep", {}
    for (lr, size), best in BEST.items():
        name = f"lr={lr},size={size}"
        points[name] = {"lr": lr, "size": size, "epochs": "3"}
        write_run(folder / name, accuracy=lambda epoch, best=best: best * epoch / 3)
    (folder / "sweep.json").write_text(json.dumps({"points": points}))
    return folder


def test_a_sweeps_folder_stands_for_its_runs_and_each_setting_that_varies_has_a_chart(sweep):
    report = collect([sweep])
    assert len(report.runs) == len(BEST)
    lr, size = report.beside.sweep
    assert (lr.setting, size.setting) == ("lr", "size")
    assert "B: accuracy 0.9" in lr.text
    assert 'id="sweep-lr"' in render(report).html


def test_runs_stand_at_the_logarithm_of_the_value_and_higher_where_they_are_better(sweep):
    lr, _ = collect([sweep]).beside.sweep
    x = {label: at for at, label in lr.x_ticks}
    assert math.isclose(x["1e-2"] - x["1e-3"], x["1e-1"] - x["1e-2"], abs_tol=0.02)
    by_height = sorted(zip(BEST.values(), lr.dots, strict=True), key=lambda pair: -pair[1].y)
    assert [best for best, _ in by_height] == sorted(BEST.values())


def test_runs_of_no_sweep_or_of_two_have_no_such_chart(sweep, tmp_path):
    other = write_run(tmp_path / "other")
    assert collect([other, *sorted(sweep.glob("lr=*"))]).beside.sweep == []


def test_a_folder_that_is_neither_a_run_nor_a_sweep_is_refused(tmp_path):
    (tmp_path / "sweep.json").write_text("[]")
    with pytest.raises(UserError):
        collect([tmp_path])
