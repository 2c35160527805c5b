"""`samestep.load`, `evaluate` and `predict`: a run's model, from its directory or its recipe."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import samestep
from samestep import UserError
from tests.api.recipes import made
from tests.command_line import RECIPE

READS = f"""{RECIPE}
from dataclasses import replace
recipe = replace(recipe, read=lambda path: [torch.tensor([float(n) for n in line.split()])
                                            for line in path.read_text().splitlines()])
""".replace("lambda path:", "lambda _, path:")


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
    Path("small.py").unlink()
    assert samestep.load(small_run).out_features == 2
    Path("run/recipe.py").unlink()
    with pytest.raises(UserError):
        samestep.load(small_run)
    with pytest.raises(UserError):  # another model than the checkpoint's
        samestep.load(small_run, recipe=made(lambda: nn.Linear(4, 3)))


@pytest.mark.parametrize(
    "call",
    [
        lambda: samestep.load("run", "checkpoint_epoch_9.pt"),
        lambda: samestep.predict("run", []),
        lambda: samestep.predict("run", "nowhere.txt"),
    ],
)
def test_a_mistake_is_one_message(small_run, call):
    with pytest.raises(UserError) as told:
        call()
    assert len(str(told.value).splitlines()) == 1
