"""Charts: thinned curves lose no peak and no gap; a scaling study's curve; a sweep's dots."""

import json
import math

import numpy as np
import pytest

from samestep.errors import UserError
from samestep.reporting.charts import MOST_POINTS, grouped_means, make_curve
from samestep.reporting.collect import collect
from samestep.reporting.page import render
from tests.reporting.made_runs import write_run
from tests.reporting.pages import ReadPage


def test_a_short_curve_stays_one_without_a_number_is_none_and_parts_add_up():
    curve = make_curve("loss", "steps", 0, [1, 2, 3], [0.5, 0.25, 0.125])
    assert (curve.x, curve.y, curve.gaps) == ((1, 2, 3), (0.5, 0.25, 0.125), 0)
    assert make_curve("loss", "steps", 0, [1, 2], [None, math.nan]) is None
    rows = np.random.default_rng(0).random((5000, 3))
    means, last = grouped_means(rows, most=100)
    assert means.shape == (100, 3)
    assert last[-1] == 4999
    assert np.allclose(means.mean(axis=0), rows.mean(axis=0))


def test_a_long_curve_keeps_every_peak_and_values_that_are_not_finite_are_gaps():
    values = np.sin(np.arange(300_000) / 5000)
    values[123_456], values[234_567] = 40.0, -30.0
    curve = make_curve("loss", "steps", 0, np.arange(300_000), values)
    assert len(curve.x) <= MOST_POINTS
    assert dict(zip(curve.x, curve.y, strict=True))[123_456] == 40.0
    assert dict(zip(curve.x, curve.y, strict=True))[234_567] == -30.0
    assert (curve.x[0], curve.x[-1]) == (0, 299_999)
    assert curve.summary[1:3] == (-30.0, 40.0)
    assert list(curve.x) == sorted(curve.x)
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


def study(path, speed_ups):
    same = {"batch_size": 32, "steps_per_s": 10.0, "rounds": 3, "segments": 9}
    same |= {"efficiency_interval": [0.1, 1.0]}
    same |= {"phases_ms_per_step": {"forward": 1.0, "all_reduce": 0.5}}
    same |= {"lost_ms_per_step": {"forward": 0.0, "all_reduce": 0.5}}
    rows = []
    for ranks, speed_up in speed_ups.items():
        own = {"ranks": ranks, "global_batch_size": 32 * ranks, "efficiency": speed_up / ranks}
        own |= {"samples_per_s": 1000.0 * speed_up, "speed_up": speed_up}
        rows.append(same | own | {"speed_up_interval": [speed_up - 0.1, speed_up + 0.1]})
    table = {"recipe": "toy", "seconds": 1.5, "modes": {"weak": rows}, "warnings": ["<b> busy"]}
    path.write_text(json.dumps(table))
    return path


def test_a_studys_page_has_a_curve_below_the_ideal_with_an_interval_for_each_point(tmp_path):
    part = collect([study(tmp_path / "s.json", {1: 1.0, 2: 1.8, 4: 3.0})]).studies[0].parts[0]
    assert [point.ranks for point in part.points] == [1, 2, 4]
    # y grows downwards.
    assert part.points[2].y > part.ideal[3]
    assert all(point.high < point.y < point.low for point in part.points)
    assert part.points[1].x - part.points[0].x == pytest.approx(
        part.points[2].x - part.points[1].x, abs=0.1
    )
    assert part.table.rows[2][3:] == ("3.00", "2.90–3.10", "75\N{NO-BREAK SPACE}%")
    page = ReadPage(render(collect([study(tmp_path / "s.json", {1: 1.0, 2: 0.8})])).html)
    assert "scaling-weak" in page.with_attribute("id")
    assert "<b> busy" in page.shown()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"recipe": "x", "modes": {"weak": [{}, {}]}}'])
def test_another_file_is_refused_by_its_name(tmp_path, text):
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(UserError, match=r"other\.json"):
        collect([file])


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


def test_a_sweeps_folder_has_a_chart_of_each_setting_that_varies_its_runs_at_the_logarithm(sweep):
    report = collect([sweep])
    assert len(report.runs) == len(BEST)
    lr, size = report.beside.sweep
    assert (lr.setting, size.setting) == ("lr", "size")
    assert "B: accuracy 0.9" in lr.text
    assert 'id="sweep-lr"' in render(report).html
    lr, _ = collect([sweep]).beside.sweep
    x = {label: at for at, label in lr.x_ticks}
    assert math.isclose(x["1e-2"] - x["1e-3"], x["1e-1"] - x["1e-2"], abs_tol=0.02)
    by_height = sorted(zip(BEST.values(), lr.dots, strict=True), key=lambda pair: -pair[1].y)
    assert [best for best, _ in by_height] == sorted(BEST.values())


def test_runs_of_no_sweep_or_of_two_have_no_such_chart_and_another_folder_not(sweep, tmp_path):
    other = write_run(tmp_path / "other")
    assert collect([other, *sorted(sweep.glob("lr=*"))]).beside.sweep == []
    (tmp_path / "sweep.json").write_text("[]")
    with pytest.raises(UserError):
        collect([tmp_path])
