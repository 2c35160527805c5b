"""`samestep.sweep` from Python."""

import pytest
import torch
from torch import nn

import samestep
from samestep import Recipe, Splits, UserError


def recipe() -> Recipe:
    """Return a recipe that no file has, as one made in a notebook."""
    x = torch.linspace(-1, 1, 60).reshape(20, 3)
    y = (x[:, 0] > 0).long()

    def data() -> Splits:
        return Splits(train=(x, y), validation=(x, y))

    def model() -> nn.Module:
        return nn.Linear(3, 2)

    return Recipe(model=model, data=data, name="made", settings={"epochs": 1, "batch_size": 5})


@pytest.mark.slow
def test_a_recipe_made_in_python_is_trained_with_each_value(here, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    asked = {"lr": [0.01, 0.1], "pictures": False, "folder": "sweep", "quiet": True}
    made = recipe()
    runs = samestep.sweep(made, **asked)
    assert [run.settings["lr"] for run in runs] == [0.01, 0.1]
    alone = samestep.train(made, lr=0.1, pictures=False, run_dir="alone", quiet=True)
    assert runs[1].result["weights_sha256"] == alone.result["weights_sha256"]
    before = [run.history for run in runs]
    assert [run.history for run in samestep.sweep(made, **asked)] == before
    with pytest.raises(UserError):
        samestep.sweep(made, **(asked | {"lr": [0.01, 0.2]}))


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": [0.1, "x"]},
        {"lr": [0.1, 0.1]},
        {"lr": []},
        {"lr": 0.1},
        {"lr": [0.1, 0.01], "no_such": 1},
        {"lr": [0.1, 0.01], "at_once": 0},
        {"lr": [0.1, 0.01], "run_dir": "x"},
        {"seed": [*range(1001)]},
    ],
)
def test_a_mistake_is_an_error_before_the_first_training(wrong, here):
    with pytest.raises(UserError):
        samestep.sweep(recipe(), **wrong, folder="sweep", quiet=True)
    assert not (here / "sweep").exists()
