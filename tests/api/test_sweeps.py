"""`samestep.sweep` from Python."""

import pytest

import samestep
from samestep import UserError
from tests.api.recipes import made


@pytest.mark.slow
def test_a_recipe_made_in_python_is_trained_with_each_value(here, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    asked = {"lr": [0.01, 0.1], "pictures": False, "folder": "sweep", "quiet": True}
    recipe = made(settings={"epochs": 1})
    runs = samestep.sweep(recipe, **asked)
    assert [run.settings["lr"] for run in runs] == [0.01, 0.1]
    alone = samestep.train(recipe, lr=0.1, pictures=False, run_dir="alone", quiet=True)
    assert runs[1].result["weights_sha256"] == alone.result["weights_sha256"]
    before = [run.history for run in runs]
    assert [run.history for run in samestep.sweep(recipe, **asked)] == before
    with pytest.raises(UserError):
        samestep.sweep(recipe, **(asked | {"lr": [0.01, 0.2]}))


@pytest.mark.parametrize("wrong", [{"lr": []}, {"lr": 0.1}, {"lr": [0.1, 0.01], "run_dir": "x"}])
def test_a_mistake_is_an_error_before_the_first_training(wrong, here):
    with pytest.raises(UserError):
        samestep.sweep(made(), **wrong, folder="sweep", quiet=True)
    assert not (here / "sweep").exists()
