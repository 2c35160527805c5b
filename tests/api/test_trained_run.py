"""What a run shows of itself: curves, and the table in a notebook."""

import base64
import json
import re
import shutil
import sys

import pytest

import samestep
from samestep import TrainedRun, UserError
from samestep.reporting.pictures import Album, png, replace_pictures
from tests.api.recipes import made


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of 4 epochs, only to be looked at."""
    folder = tmp_path_factory.mktemp("run") / "a <b>run</b> $x"
    return samestep.train(made(name="mine"), run_dir=folder, quiet=True)


def test_the_curves_are_those_of_the_records_and_a_notebook_shows_facts_and_no_markup(trained):
    figure = trained.plot()
    panels = {panel.get_title(): panel for panel in figure.axes}
    assert list(panels) == ["loss", "accuracy"]
    for name, panel in panels.items():
        lines = {line.get_label(): line for line in panel.lines}
        for label, key in (("training", name), ("validation", f"validation_{name}")):
            assert list(lines[label].get_xdata()) == [1, 2, 3, 4]
            assert list(lines[label].get_ydata()) == [row[key] for row in trained.per_epoch]
    best = trained.result["best"]
    (mark,) = (line for line in panels["accuracy"].lines if line.get_marker() == "*")
    assert (list(mark.get_xdata()), list(mark.get_ydata())) == ([best["epoch"]], [best["value"]])
    assert figure._repr_png_().startswith(b"\x89PNG")
    shown = trained._repr_html_()
    assert "<b>" not in shown
    assert "mine" in shown
    assert "completed" in shown
    assert f"{trained.result['test']['accuracy']:.4f}" in shown
    assert shown.count("<polyline") == 1
    points = re.search(r"points='([^']*)'", shown)[1].split()
    assert len(points) == 4


def test_without_an_epoch_or_matplotlib_there_are_no_curves(tmp_path, trained, monkeypatch):
    (tmp_path / "settings.toml").write_text("lr = 1.0\n")
    (tmp_path / "events.jsonl").write_text("")
    with pytest.raises(UserError, match="epoch"):
        TrainedRun(tmp_path).plot()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=re.escape("pip install 'samestep[plot]'")):
        trained.plot()


def test_a_notebook_shows_the_boundary_if_small_and_nothing_else(trained, tmp_path):
    run = shutil.copytree(trained.path, tmp_path / "run")
    small, large = png(bytes(12), 2, 2, 3), png(bytes(12), 2, 2, 3) + bytes(300_000)
    for content in (small, large):
        album = Album()
        for name in ("other", "boundary"):
            entry = {"name": name, "kind": "figure", "title": name, "file": f"{name}.png"}
            told = {"text": "<script>'\"" if name == "boundary" else "other"}
            album.add(entry | told, {f"{name}.png": content if name == "boundary" else small})
        replace_pictures(run, album, checkpoint="last", split="test")
        shown = TrainedRun(run)._repr_html_()
        assert "<script" not in shown
        data = base64.b64encode(small).decode()
        assert (f"data:image/png;base64,{data}" in shown) == (content is small)
        assert len(shown) < 200_000
    run = tmp_path / "run"
    (run / "pictures").mkdir(parents=True)
    (run / "settings.toml").write_text("lr = 1.0\n")
    (run / "events.jsonl").write_text("no record\n")
    (tmp_path / "secret.png").write_bytes(png(bytes(12), 2, 2, 3))
    entry = {"name": "../../secret", "kind": "figure", "title": "x", "file": "x"}
    index = {"format": 1, "pictures": [entry, 7, {"kind": "figure"}]}
    (run / "pictures" / "pictures.json").write_text(json.dumps(index))
    shown = TrainedRun(run)._repr_html_()
    assert "<img" not in shown
    assert "events.jsonl" in shown, "what is wrong with it is told"
