"""A scaling study becomes a curve beside the ideal, with its intervals."""

import json

import pytest

from samestep.errors import UserError
from samestep.reporting.collect import collect
from samestep.reporting.page import render
from tests.reporting.pages import ReadPage


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


def test_the_curve_lies_below_the_ideal_and_each_point_has_its_interval(tmp_path):
    part = collect([study(tmp_path / "s.json", {1: 1.0, 2: 1.8, 4: 3.0})]).studies[0].parts[0]
    assert [point.ranks for point in part.points] == [1, 2, 4]
    # y grows downwards.
    assert part.points[2].y > part.ideal[3]
    assert all(point.high < point.y < point.low for point in part.points)
    assert part.points[1].x - part.points[0].x == pytest.approx(
        part.points[2].x - part.points[1].x, abs=0.1
    )
    assert part.table.rows[2][3:] == ("3.00", "2.90–3.10", "75\N{NO-BREAK SPACE}%")


def test_a_study_makes_a_page(tmp_path):
    page = ReadPage(render(collect([study(tmp_path / "s.json", {1: 1.0, 2: 0.8})])).html)
    assert "scaling-weak" in page.with_attribute("id")
    assert "<b> busy" in page.shown()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"recipe": "x", "modes": {"weak": [{}, {}]}}'])
def test_another_file_is_refused_by_its_name(tmp_path, text):
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(UserError, match=r"other\.json"):
        collect([file])
