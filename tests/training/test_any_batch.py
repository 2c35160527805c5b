"""Batches of any form train the same on any number of ranks, in micro-steps, and when resumed.

The examples of the handbook are the recipes.
"""

import signal
from pathlib import Path

import pytest

from samestep import read_records
from samestep.session.trained_model import evaluate_run
from tests import tiny
from tests.faults import Fault

EXAMPLES = Path(__file__).parents[2] / "examples"
FP64 = ("--precision", "fp64", "--log-every", "1", "--epochs", "2")
RECIPES = {
    # No number of ranks here shares out the last batch evenly.
    "padded_text.py": ("--num-sentences", "109", "--width", "8"),
    "csv_regression.py": ("--hidden", "8"),
    "streaming.py": ("--hidden", "8"),
    "graphs.py": ("--num-graphs", "109", "--width", "4"),
    "huggingface.py": ("--num-reviews", "109", "--width", "8", "--layers", "1"),
    "char_gpt.py": (
        *("--text-file", str(EXAMPLES.parent / "LICENSE")),
        *("--dim", "8", "--heads", "2", "--layers", "1"),
    ),
}


@pytest.fixture(scope="module", params=RECIPES)
def alone(request, tmp_path_factory):
    """Give a recipe, its flags, and the run of a single process."""
    folder = tmp_path_factory.mktemp("alone")
    recipe, flags = EXAMPLES / request.param, (*FP64, *RECIPES[request.param])
    tiny.trained(recipe, folder / "run", *flags)
    return recipe, flags, folder / "run"


def test_micro_steps_on_two_ranks_gone_on_with_on_one_are_the_same_training(alone, tmp_path):
    """Stopped in the middle of an epoch."""
    recipe, flags, reference = alone
    run, size = tmp_path / "run", read_start(reference)["global_batch_size"]
    stop = Fault("after a step", 4, signal.SIGTERM, rank=None)
    tiny.struck(recipe, run, stop, *flags, "--micro-batch-size", str(size // 8), on=2)
    tiny.resumed(run)
    tiny.assert_same_training(run, reference, 1e-9)


def read_start(run: Path):
    return next(record for record in read_records(run) if record["event"] == "start")


def test_an_evaluation_of_the_run_measures_what_the_training_did(alone):
    _, _, run = alone
    last = [record for record in read_records(run) if record["event"] == "evaluation"][-1]
    measured = evaluate_run(run, "last", split="validation")
    for name in measured.keys() & last.keys() - {"event", "split", "step"}:
        assert measured[name] == pytest.approx(last[name], rel=1e-12), name
    assert measured["samples"] > 30


TEXT = EXAMPLES / "padded_text.py"


def test_terms_are_added_up_where_ddp_follows_the_forward_and_none_can_travel(tmp_path):
    flags = (*FP64, *RECIPES[TEXT.name])
    tiny.trained(TEXT, tmp_path / "alone", *flags)
    followed = ("--find-unused", "--static-graph")
    words = [[TEXT, "--run-dir", tmp_path / flag, *flags, flag] for flag in followed]
    tiny.train_all(words, on=2, folder=tmp_path)
    for flag in followed:
        tiny.assert_same_training(tmp_path / flag, tmp_path / "alone", 1e-9)


def test_a_mean_over_words_is_not_the_mean_of_the_sentences_means(tmp_path):
    """What it would be without loss_terms: another loss on each number of ranks."""
    wrong = tmp_path / "wrong.py"
    wrong.write_text(TEXT.read_text().replace("    loss_terms=", "    # loss_terms="))
    flags = (*FP64, *RECIPES[TEXT.name], "--max-steps", "3")
    words = []
    for recipe in (TEXT, wrong):
        tiny.trained(recipe, tmp_path / f"{recipe.stem}-1", *flags)
        words.append([recipe, "--run-dir", tmp_path / f"{recipe.stem}-2", *flags])
    tiny.train_all(words, on=2, folder=tmp_path)

    def difference(name):
        both = [tiny.events(tmp_path / f"{name}-{ranks}", "step") for ranks in (1, 2)]
        return max(abs(a["loss"] - b["loss"]) for a, b in zip(*both, strict=True))

    assert difference("padded_text") < 1e-12
    assert difference("wrong") > 1e-3
