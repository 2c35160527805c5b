"""Batches of any form train the same on any number of ranks, with micro-steps, and when they resume.

The examples of the handbook are the recipes.
"""

from pathlib import Path

import pytest
import torch

from samestep import read_records
from tests import tiny

EXAMPLES = Path(__file__).parents[2] / "examples"
FP64 = ("--precision", "fp64", "--log-every", "1", "--epochs", "2")
RECIPES = {
    # 109 sentences and 909 rows: neither 2 nor 3 ranks share out the last batch evenly.
    "padded_text.py": ("--num-sentences", "109", "--width", "8"),
    "csv_regression.py": ("--hidden", "8"),
}


@pytest.fixture(scope="module", params=RECIPES)
def alone(request, tmp_path_factory):
    """Give a recipe, its flags, and the run of a single process."""
    folder = tmp_path_factory.mktemp("alone")
    recipe, flags = EXAMPLES / request.param, (*FP64, *RECIPES[request.param])
    tiny.train(recipe, "--run-dir", str(folder / "run"), *flags, folder=folder)
    return recipe, flags, folder / "run"


@pytest.mark.parametrize(("world_size", "micro"), [(2, None), (3, None), (2, 3)])
def test_it_is_the_same_training_on_several_ranks_and_with_micro_steps(
    alone, tmp_path, world_size, micro
):
    recipe, flags, reference = alone
    size = read_start(reference)["global_batch_size"]
    if size % world_size:
        run, more = resumed_from_the_start(recipe, flags, tmp_path, world_size)
    else:
        run, more = tmp_path / "run", ("--batch-size", str(size // 4)) if micro else ()
        flags = (*flags, "--run-dir", str(run), *more)
        tiny.train(recipe, *flags, world_size=world_size, folder=tmp_path)
    tiny.assert_same_training(run, reference, 1e-9)


def resumed_from_the_start(recipe, flags, folder, world_size):
    """Train one step alone, then the rest on ranks among which the batch is shared unevenly."""
    run = folder / "run"
    short = (*flags, "--run-dir", str(run), "--checkpoint-every-steps", "1", "--max-steps", "1")
    tiny.train(recipe, *short, folder=folder)
    tiny.resume(run, "--max-steps", "1000000", world_size=world_size, folder=folder)
    return run, ()


def read_start(run: Path):
    return next(record for record in read_records(run) if record["event"] == "start")


def test_it_goes_on_on_another_number_of_ranks_from_the_middle_of_an_epoch(alone, tmp_path):
    recipe, flags, reference = alone
    run = tmp_path / "run"
    tiny.train(
        recipe, "--run-dir", str(run), *flags, "--max-steps", "5", world_size=2, folder=tmp_path
    )
    tiny.resume(run, "--max-steps", "1000000", world_size=1, folder=tmp_path)
    tiny.assert_same_training(run, reference, 1e-9)


def test_a_mean_over_words_is_not_the_mean_of_the_sentences_means(tmp_path):
    """What it would be without loss_terms: another loss on each number of ranks."""
    text = (EXAMPLES / "padded_text.py").read_text()
    wrong = tmp_path / "wrong.py"
    wrong.write_text(text.replace("    loss_terms=", "    # loss_terms="))
    flags = (*FP64, *RECIPES["padded_text.py"], "--max-steps", "3")
    losses = {}
    for recipe in (EXAMPLES / "padded_text.py", wrong):
        for world_size in (1, 2):
            run = tmp_path / f"{recipe.stem}-{world_size}"
            tiny.train(
                recipe, "--run-dir", str(run), *flags, world_size=world_size, folder=tmp_path
            )
            steps = [r["loss"] for r in read_records(run) if r["event"] == "step"]
            losses[recipe.stem, world_size] = torch.tensor(steps, dtype=torch.float64)
    right = losses["padded_text", 1] - losses["padded_text", 2]
    assert right.abs().max() < 1e-12
    assert (losses["wrong", 1] - losses["wrong", 2]).abs().max() > 1e-3
