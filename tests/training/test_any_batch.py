"""Batches of any form train the same on any number of ranks, in micro-steps, and when resumed."""

import os
import signal
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from torch.profiler import ProfilerActivity, profile

from samestep.core.session.build import build
from samestep.core.session.trained_model import evaluate_run
from samestep.core.training.loop import rehearse
from samestep.launch.ranks.world import find_world, join, leave
from samestep.shell.api.call import as_in_fresh_process
from samestep.shell.commands.train import parse
from tests import tiny
from tests.command_line import call
from tests.faults import POINTS
from tests.processes import free_port, run_ranks

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


def train_until_stopped(trainings: list[list[str]], ports: list[int]) -> None:
    """Train on the ranks that this process is one of, each time to a signal after the 1st step."""
    steps = 0

    def strike() -> None:
        nonlocal steps
        steps += 1
        if steps == 1:  # ranks meet after the first step, and then twice a second
            os.kill(os.getpid(), signal.SIGTERM)

    POINTS["after a step"](strike)
    for words, port in zip(trainings, ports, strict=True):
        steps = 0
        os.environ["MASTER_PORT"] = str(port)
        with as_in_fresh_process():
            assert call("train", *words) == 128 + signal.SIGTERM, words


QUICK = ("padded_text.py", "graphs.py")  # a mean over words, and batches of graphs
SLOW = tuple(name for name in RECIPES if name not in QUICK)


@pytest.mark.parametrize(
    "names", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["", "slow"]
)
def test_micro_steps_on_two_ranks_gone_on_with_on_one_are_the_same_training(tmp_path, names):
    words = []
    for name in names:
        flags, alone = (*FP64, *RECIPES[name]), tmp_path / f"{name} alone"
        tiny.trained(EXAMPLES / name, alone, *flags)
        (started,) = tiny.events(alone, "start")
        micro = ("--micro-batch-size", str(started["global_batch_size"] // 8))
        words.append([str(EXAMPLES / name), "--run-dir", str(tmp_path / name), *flags, *micro])
    ports = [free_port() for _ in words]
    run_ranks(train_until_stopped, 2, tmp_path / "output", words, ports)
    for name in names:
        alone, run = tmp_path / f"{name} alone", tmp_path / name
        last = tiny.events(alone, "evaluation")[-1]
        tiny.resumed(run)
        tiny.assert_same_training(run, alone, 1e-9)
        measured = evaluate_run(alone, "last", split="validation")
        for field in measured.keys() & last.keys() - {"event", "split", "step"}:
            assert measured[field] == pytest.approx(last[field], rel=1e-12), (name, field)
        assert measured["samples"] > 30


TEXT = EXAMPLES / "padded_text.py"


def test_terms_are_added_up_where_ddp_follows_the_forward_and_none_can_travel(tmp_path):
    """Without loss_terms, a mean over words would be another loss on each number of ranks."""
    wrong = tmp_path / "wrong.py"
    wrong.write_text(TEXT.read_text().replace("    loss_terms=", "    # loss_terms="))
    flags = (*FP64, *RECIPES[TEXT.name], "--max-steps", "6")
    followed = ("--find-unused", "--static-graph")
    words = [[TEXT, "--run-dir", tmp_path / flag, *flags, flag] for flag in followed]
    words.append([wrong, "--run-dir", tmp_path / "wrong-2", *flags])
    tiny.trained(TEXT, tmp_path / "alone", *flags)
    tiny.trained(wrong, tmp_path / "wrong-1", *flags)
    tiny.train_all(words, on=2, folder=tmp_path)
    for flag in followed:
        tiny.assert_same_training(tmp_path / flag, tmp_path / "alone", 1e-9)
    both = [tiny.events(tmp_path / f"wrong-{ranks}", "step") for ranks in (1, 2)]
    assert max(abs(a["loss"] - b["loss"]) for a, b in zip(*both, strict=True)) > 1e-3


TERMS = """
from dataclasses import replace
recipe = replace(recipe, loss_terms=lambda batch: 2.0 * len(batch[1]))
"""
STEPS = 5


def _collectives(cases: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the collectives of a few steps of each training, in order."""
    world = find_world("cpu")
    join(world)
    found = {}
    for name, arguments in cases.items():
        _, request = parse([*arguments, "--device", "cpu", "--log-every", "100"])
        request = replace(request, options=request.recipe.complete_options(request.options))
        training = build(request, world)
        steps = rehearse(training.work, training.state)
        list(islice(steps, 3))  # ranks agree on the first, and DDP arranges its buckets after it
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            list(islice(steps, STEPS))
        found[name] = [e.name for e in profiler.events() if e.name.startswith("c10d::")]
    leave(world)
    return found


def test_loss_terms_add_no_collective_to_a_step(tmp_path: Path):
    plain = str(tiny.write_recipe(tmp_path))
    terms = str(tiny.write_recipe(tmp_path, tiny.RECIPE + TERMS, "terms.py"))
    cases = {
        "plain": [plain],
        "terms": [terms],
        "plain, unused": [plain, "--find-unused"],
        "terms, unused": [terms, "--find-unused"],
    }
    for found in run_ranks(_collectives, 2, tmp_path / "output", cases):
        assert found["plain"] == ["c10d::allreduce_"] * STEPS
        assert found["terms"] == found["plain"]
        # There the terms cannot travel with the gradients: the count sees what is added.
        assert len(found["terms, unused"]) == len(found["plain, unused"]) + STEPS
