"""What a run shows of itself: curves, and the table in a notebook."""

import base64
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import samestep
from samestep import TrainedRun, UserError
from samestep.base.run.pictures import Album, png, replace_pictures
from tests.api.recipes import made
from tests.command_line import RECIPE


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
    run = tmp_path / "odd"
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


READS = f"""{RECIPE}
from dataclasses import replace
recipe = replace(recipe, read=lambda _, path: [torch.tensor([float(n) for n in line.split()])
                                               for line in path.read_text().splitlines()])
"""


@pytest.fixture
def small_run(tmp_path, monkeypatch) -> samestep.TrainedRun:
    monkeypatch.chdir(tmp_path)
    Path("small.py").write_text(READS)
    return samestep.train("small.py", run_dir="run", quiet=True)


@pytest.mark.parametrize("checkpoint", ["best", "last", "checkpoint_epoch_1.pt"])
def test_a_loaded_model_is_plain_torch_with_the_weights_that_were_evaluated(small_run, checkpoint):
    model = samestep.load(small_run, checkpoint)
    assert type(model) is nn.Linear
    assert not model.training
    x = torch.randn(90, 4, generator=torch.Generator().manual_seed(7))[75:]
    y = (x[:, 0] > 0).long()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(x), y).item()
    found = samestep.evaluate(small_run, checkpoint)
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    assert set(found) >= {"checkpoint", "split", "accuracy", "samples"}


def test_evaluate_and_predict_return_what_the_verbs_print(small_run, output_of):
    Path("rows.txt").write_text("1 2 3 4\n-1 0 0 0\n")
    Path("bad.txt").write_text("one two\n")
    files = ["rows.txt", Path("bad.txt")]
    said = json.loads(output_of("evaluate", "run", "--json", "--split", "validation"))
    assert samestep.evaluate(small_run, split="validation") == said
    found = samestep.predict("run", files, top=1)
    assert [row.get("row") for row in found] == [1, 2, None]
    assert found[0]["classes"][0].keys() == {"class", "probability"}
    assert "problem" in found[2]
    assert samestep.predict("run", "rows.txt", top=1) == found[:2]
    for files in ([], "nowhere.txt"):
        with pytest.raises(UserError):
            samestep.predict("run", files)


def test_a_recipe_of_no_file_is_given_again_or_remembered_by_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = made(name="mine", read=lambda _, path: [*torch.ones(3, 4)])
    small_run = samestep.train(recipe, quiet=True, epochs=1)
    assert small_run.path.name.startswith("mine-")
    for ask in (samestep.load, samestep.evaluate):
        with pytest.raises(UserError):
            ask(small_run.path)
    assert isinstance(samestep.load(small_run.path, recipe=recipe), nn.Linear)
    assert samestep.evaluate(small_run.path, recipe=recipe)["loss"] == pytest.approx(
        small_run.result["test"]["loss"], rel=1e-5
    )
    again = samestep.train(small_run, resume=True, epochs=2, quiet=True)
    assert again.result["epochs"] == 2
    for run in (small_run, again):
        assert isinstance(samestep.load(run), nn.Linear)
        assert samestep.evaluate(run)["samples"] == 15
        assert len(samestep.predict(run, __file__)) == 3
    assert samestep.TrainedRun(small_run.path) == small_run


def test_a_recipe_file_that_is_gone_is_read_from_the_run_and_a_lost_copy_is_told(small_run):
    with pytest.raises(UserError, match="checkpoint_epoch_9"):
        samestep.load("run", "checkpoint_epoch_9.pt")
    Path("small.py").unlink()
    assert samestep.load(small_run).out_features == 2
    Path("run/recipe.py").unlink()
    with pytest.raises(UserError):
        samestep.load(small_run)
    with pytest.raises(UserError):  # another model than the checkpoint's
        samestep.load(small_run, recipe=made(lambda: nn.Linear(4, 3)))
