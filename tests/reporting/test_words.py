"""Columns, sparklines and curves of characters; the table of a folder's runs."""

import json
import math
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from samestep.base.errors import UserError
from samestep.base.table import columns_of as cells
from samestep.base.words import BOTH, FIRST, LABEL, SECOND, Columns, curve_lines, sparkline
from samestep.cluster.sweeping.side_by_side import best_text
from samestep.show.progress import metrics_of
from samestep.show.reporting.charts import MOST_POINTS, grouped_means, make_curve
from samestep.show.reporting.collect import collect
from samestep.show.reporting.page import render
from samestep.show.reporting.run_table import ListedRun, as_json, checkpoint_lines, run_lines
from tests.reporting.made_runs import write_run
from tests.reporting.pages import ReadPage


def test_numbers_of_a_column_stand_below_each_other_and_differing_curves_alone():
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
    assert shown == ["1e-09", "not finite", "1e+30"]
    lines = curve_lines([0.0, 1.0, 1.0], [0.0, 1.0, 0.0], 40, 2)
    assert [line[LABEL:] for line in lines] == [f" {BOTH}{FIRST}", f"{BOTH} {SECOND}"]
    assert [line[:LABEL].strip() for line in lines] == ["1", "0"]


@pytest.mark.parametrize(
    ("values", "drawn"),
    [
        ((), ""),
        ((8, 7, 6, 5, 4, 3, 2, 1), "█▇▆▅▄▃▂▁"),
        ((1.0, math.nan, 2.0, math.inf), "▁×█×"),
        ((1e308, -1e308, 1e308), "█▁█"),
    ],
)
def test_a_curve_has_a_character_for_each_value(values, drawn):
    assert sparkline(values) == drawn


def summary(name, **more):
    table = {"recipe": "spiral", "state": "completed", "metric": "accuracy", "mode": "max"}
    table |= {"value": 0.99671, "seconds": 3725.0, "started": 1.8e9, "losses": (3.0, 1.2, 1.0)}
    return ListedRun(name=name, run_dir=Path("runs") / name, **{**table, **more})


def test_a_small_value_has_the_same_digits_on_every_screen():
    shown = [*run_lines([summary("run", value=2e-6, losses=(2e-6,))], None)]
    shown.append(best_text({"best": {"metric": "loss", "value": 2e-6}}))
    shown.append(str(metrics_of({"loss": 2e-6})))
    entry = {"path": "a", "step": 1, "epoch": 1, "metric_name": "loss", "metric": 2e-6, "bytes": 1}
    shown += checkpoint_lines([{**entry, "time": 1.8e9, "best": True, "last": True}])
    assert sum(line.count("2.00e-06") for line in shown) == 5
    assert not any("0.0000" in line for line in shown)


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
    run = summary("run", losses=(1.0, None), value=None)
    _, line = run_lines([run], 100)
    assert "▁×" in line
    assert "not finite" in line
    assert as_json(run)["losses"] == [1.0, None]
    assert datetime.fromisoformat(as_json(summary("run"))["started"]).timestamp() == 1.8e9
    for started in (None, 1e300, math.inf):
        assert as_json(summary("run", started=started))["started"] is None


def test_a_long_curve_keeps_peaks_and_gaps_and_a_short_one_stays():
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
    curve = make_curve("loss", "steps", 0, [1, 2, 3], [0.5, 0.25, 0.125])
    assert (curve.x, curve.y, curve.gaps) == ((1, 2, 3), (0.5, 0.25, 0.125), 0)
    assert make_curve("loss", "steps", 0, [1, 2], [None, math.nan]) is None
    rows = np.random.default_rng(0).random((5000, 3))
    means, last = grouped_means(rows, most=100)
    assert means.shape == (100, 3)
    assert last[-1] == 4999
    assert np.allclose(means.mean(axis=0), rows.mean(axis=0))


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
    one, two, four = (point.x for point in part.points)
    assert two - one == pytest.approx(four - two, abs=0.1)
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
