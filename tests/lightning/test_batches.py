"""Lightning's Trainer takes a recipe's own batches and metrics as samestep's own loop does.

`samestep verify` compares both for other recipes: tests/examples/test_recipes.py.
"""

import pytest

from tests import tiny
from tests.command_line import read_json
from tests.lightning.test_engine import TINY, TOLERANCE, _trainer, with_both
from tests.processes import run_ranks
from tests.training.test_any_batch import EXAMPLES, FP64, RECIPES
from tests.training.test_metrics import RECIPE as OBJECTS


def test_graphs_in_micro_steps_of_uneven_shares_train_as_in_the_native_loop(tmp_path):
    """128 and 13 graphs of 109 a step and rank: the last step needs fewer micro-steps."""
    flags = (*FP64, *RECIPES["graphs.py"], "--batch-size", "32", "--micro-batch-size", "4")
    compared(EXAMPLES / "graphs.py", tmp_path, *flags)


def test_metric_objects_are_reduced_as_in_the_native_loop(tmp_path):
    compared(tiny.write_recipe(tmp_path, TINY + OBJECTS), tmp_path, "--epochs", "2")


def compared(recipe, folder, *flags):
    ours, theirs = with_both(folder, recipe, *flags, world_size=2)
    tiny.assert_same_training(ours, theirs, TOLERANCE)
    assert read_json(ours / "result.json")["best"] == pytest.approx(
        read_json(theirs / "result.json")["best"]
    )


def test_a_users_own_trainer_takes_them_too(tmp_path):
    recipe, run = EXAMPLES / "graphs.py", tmp_path / "run"
    tiny.trained(recipe, run, "--epochs", "1")
    (expected,) = (r for r in tiny.account(run) if r["event"] == "evaluation")
    ((loss, accuracy),) = run_ranks(_fit, 1, tmp_path / "own", str(recipe))
    assert loss == pytest.approx(expected["loss"], rel=1e-5)
    assert accuracy == pytest.approx(expected["accuracy"], rel=1e-6)


def _fit(recipe: str) -> tuple[float, float]:
    from samestep import LitData, LitRecipe

    trainer = _trainer(max_epochs=1)
    trainer.fit(LitRecipe(recipe), LitData(recipe))
    return tuple(float(trainer.callback_metrics[f"val_{name}"]) for name in ("loss", "accuracy"))
