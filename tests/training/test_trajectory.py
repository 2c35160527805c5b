"""The promise of the same step, tried with real processes."""

import contextlib
import json
import math
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from samestep import read_records
from tests import tiny
from tests.faults import Fault
from tests.processes import samestep, start_ranks

FP64 = ("--precision", "fp64")

# 509 training samples and a global batch of 24: no world size here divides the data, and the
# last global batch is incomplete.
RECIPE = """
import torch
from torch import nn
from samestep import Recipe, Splits

def data():
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(609, 8, generator=generator, dtype=torch.float64)
    y = (x[:, 0] * x[:, 1] > 0).long()
    return Splits(train=(x[:509], y[:509]), validation=(x[509:], y[509:]), test=(x[509:], y[509:]))

def model():
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2))

recipe = Recipe(model=model, data=data, settings={"epochs": 2, "batch_size": 24, "lr": 0.01})
"""

CONVNET = """
import torch
from torch import nn
from samestep import Recipe, Splits, uniform

def data():
    generator = torch.Generator().manual_seed(7)
    x = torch.randint(256, (151, 8, 8), generator=generator, dtype=torch.uint8)
    y = (x[:, :, 4:].float().mean((1, 2)) > x.float().mean((1, 2))).long()
    return Splits(train=(x[:101], y[:101]), validation=(x[101:], y[101:]))

def model():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(36, 2),
    )

def flip(images, keys):
    return torch.where(uniform(keys, 1)[:, :, None] < 0.5, images.flip(2), images)

def normalise(images):
    return images.unsqueeze(1).double() / 255 - 0.5

recipe = Recipe(
    model=model, data=data, augment=flip, transform=normalise,
    settings={"epochs": 3, "batch_size": 12, "lr": 0.01},
)
"""
LOADED = """
from dataclasses import replace

class Images(torch.utils.data.Dataset):
    def __init__(self, images, labels):
        self.images, self.labels = images, labels
    def __len__(self):
        return len(self.images)
    def __getitem__(self, index):
        return self.images[index], int(self.labels[index])

def loaded():
    splits = data()
    return Splits(train=Images(*splits.train), validation=Images(*splits.validation))

recipe = replace(recipe, data=loaded)
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "small.py"
    path.write_text(RECIPE)
    return str(path)


def train(recipe: str, folder: Path, name: str, *flags: str, world_size: int = 1):
    run, output = folder / name, folder / f"{name}-output"
    command = ("train", recipe, "--run-dir", str(run), "--log-every", "1", *flags)
    ranks = samestep(*command, world_size=world_size, folder=output)
    assert [p.exitcode for p in ranks.processes] == [0] * world_size, ranks.output()
    return records_of(run)


def weights_of(run: Path):
    last = torch.load(run / "checkpoints" / "checkpoint_epoch_2.pt", weights_only=True)
    return last["model"].values()


def records_of(run: Path):
    return [r for r in read_records(run) if r["event"] in ("step", "evaluation", "epoch")]


def stop_and_resume(
    recipe: Path, folder: Path, before: int, after: int, *flags: str, nth: int = 15
) -> Path:
    """Stop a run by SIGTERM to one rank within its second epoch or later, and go on with it."""
    run = folder / "run"
    if before > 1:
        tiny.set_pace(recipe, 0.02)  # so that the ranks meet before the run is over
    fault = Fault("after a step", nth=nth, signum=signal.SIGTERM, rank=before - 1)
    stopped = tiny.start(
        recipe, "--run-dir", str(run), *flags, faults=(fault,), world_size=before, folder=folder
    )
    assert stopped.wait() == [128 + signal.SIGTERM] * before, stopped.output()
    *_, last = tiny.all_records(run)
    assert last["event"] == "stop"
    assert nth <= last["step"]
    assert last["reason"] == "SIGTERM"
    tiny.set_pace(recipe, 0)
    tiny.resume(run, world_size=after, folder=folder)
    return run


def worst(one, other) -> float:
    assert [(r["event"], r["step"], r["epoch"]) for r in one] == [
        (r["event"], r["step"], r["epoch"]) for r in other
    ]
    fields = [
        (a[name], b[name])
        for a, b in zip(one, other, strict=True)
        for name in ("loss", "grad_norm", "accuracy", "samples", "lr")
        if name in a
    ]
    return max(abs(a - b) / max(abs(a), abs(b), 1e-300) for a, b in fields)


CLIPPED = ("--clip-norm", "0.05", "--optimizer", "sgd")


@pytest.mark.parametrize(
    ("precision", "tolerance", "sizes"), [("fp64", 1e-12, (2, 5)), ("fp32", 1e-5, (3,))]
)
def test_loss_and_gradient_norm_are_those_of_one_process_on_any_number_of_ranks(
    recipe, tmp_path, precision, tolerance, sizes
):
    flags = ("--precision", precision, "--batch-size", "32", *CLIPPED)
    one = train(recipe, tmp_path, "one", *flags)
    for size in sizes:
        many = train(recipe, tmp_path, f"ranks{size}", *flags, world_size=size)
        assert worst(one, many) < tolerance
        for mine, others in zip(
            weights_of(tmp_path / "one"), weights_of(tmp_path / f"ranks{size}"), strict=True
        ):
            torch.testing.assert_close(mine, others, rtol=tolerance, atol=tolerance)
    assert json.dumps(one) != "[]"


# --- what a step is made of, cut in other ways ---


def test_micro_steps_add_up_to_the_same_step(recipe, tmp_path):
    """32 samples: at once; 11 + 11 + 10; 4 at a time on two ranks; 5 + 5 + 1 on one of three."""
    flags = (*FP64, "--batch-size", "32")
    whole = train(recipe, tmp_path, "whole", *flags)
    for name, world_size, *cut in (
        ("one", 1, *flags, "--accumulate", "3"),
        ("two", 2, *flags, "--micro-batch-size", "4"),
        ("three", 3, *flags, "--micro-batch-size", "5"),
        ("per rank", 2, *FP64, "--batch-size-per-rank", "16"),
    ):
        other = train(recipe, tmp_path, name, *cut, world_size=world_size)
        assert worst(whole, other) < 1e-12, name


def test_drop_last_leaves_out_the_same_samples_on_any_ranks(recipe, tmp_path):
    flags = (*FP64, "--drop-last")
    one = train(recipe, tmp_path, "one", *flags)
    assert [r["samples"] for r in one if r["event"] == "epoch"] == [504, 504]
    assert [r["samples"] for r in one if r["event"] == "step"] == [24 * k for k in range(1, 43)]
    assert worst(one, train(recipe, tmp_path, "three", *flags, world_size=3)) < 1e-12


def test_the_last_incomplete_batch_counts_its_samples_alone(correct):
    _, one = correct
    assert [r["samples"] for r in one if r["event"] == "epoch"] == [509, 509]
    samples = [r["samples"] for r in one if r["event"] == "step"]
    assert samples[:22] == [24 * k for k in range(1, 22)] + [509]
    assert samples[-1] == 2 * 509
    losses = [r["loss"] for r in one if r["event"] == "step"]
    weights = 21 * [24] + [5]
    mean = sum(w * x for w, x in zip(weights, losses[:22], strict=True)) / 509
    first = next(r for r in one if r["event"] == "epoch")
    assert first["loss"] == pytest.approx(mean, rel=1e-13)


def test_a_schedule_over_steps_ends_within_an_epoch_the_same_on_any_ranks(recipe, tmp_path):
    flags = (*FP64, "--max-steps", "30", "--schedule", "cosine", "--warmup-steps", "4")
    one = train(recipe, tmp_path, "one", *flags)
    three = train(recipe, tmp_path, "three", *flags, world_size=3)
    assert worst(one, three) < 1e-12
    lrs = [r["lr"] for r in one if r["event"] == "step"]
    assert len(lrs) == 30
    assert lrs[:5] == pytest.approx([0.002, 0.004, 0.006, 0.008, 0.01])
    assert lrs[4:] == sorted(lrs[4:], reverse=True)
    assert 0 < lrs[-1] < 0.0001
    assert [(r["epoch"], r["samples"]) for r in one if r["event"] == "epoch"] == [
        (1, 509),
        (2, 8 * 24),
    ]


def test_clipping_changes_the_training_and_the_recorded_norm_is_the_one_before(recipe, tmp_path):
    flags = (*FP64, "--max-steps", "5", "--optimizer", "sgd")
    free = train(recipe, tmp_path, "free", *flags)
    clipped = train(recipe, tmp_path, "clipped", *flags, "--clip-norm", "0.001")
    assert worst(free, clipped) > 1e-6
    assert clipped[0]["grad_norm"] == pytest.approx(free[0]["grad_norm"], rel=1e-14)
    assert all(r["grad_norm"] > 0.01 for r in clipped if r["event"] == "step")


# --- stopping and going on ---


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2)])
def test_a_run_stopped_within_an_epoch_goes_on_as_if_never_stopped_on_other_ranks(
    tmp_path, uninterrupted, before, after
):
    run = stop_and_resume(tiny.write_recipe(tmp_path), tmp_path, before, after)
    tiny.assert_same_training(run, uninterrupted)


@pytest.mark.parametrize("world_size", [1, 2])
def test_on_as_many_ranks_a_resumed_run_with_dropout_is_the_same_to_the_last_bit(
    tmp_path, world_size
):
    text = tiny.RECIPE.replace("nn.Tanh()", "nn.Tanh(), nn.Dropout(0.5)")
    assert text != tiny.RECIPE
    recipe = tiny.write_recipe(tmp_path, text)
    whole = tmp_path / "whole"
    tiny.train(recipe, "--run-dir", str(whole), world_size=world_size, folder=tmp_path)
    run = stop_and_resume(recipe, tmp_path, world_size, world_size)
    tiny.assert_same_training(run, whole, tolerance=0)


def test_a_run_that_reached_its_last_step_can_be_made_longer_on_other_ranks(tmp_path):
    """Its end leaves an evaluation and a checkpoint of its own; all else is as in one go."""
    recipe = tiny.write_recipe(tmp_path)
    whole, run = tmp_path / "whole", tmp_path / "run"
    flags = ("--batch-size", "13", "--run-dir")
    tiny.train(recipe, *flags, str(whole), "--max-steps", "40", folder=tmp_path)
    first = (*flags, str(run), "--max-steps", "13")
    tiny.train(recipe, *first, world_size=3, folder=tmp_path)
    tiny.resume(run, "--max-steps", "40", world_size=2, folder=tmp_path)

    def steps_and_whole_epochs(path):
        return [
            r
            for r in tiny.account(path)
            if r["event"] == "step" or (r["step"] != 13 and r.get("split") != "test")
        ]

    assert worst(steps_and_whole_epochs(run), steps_and_whole_epochs(whole)) < 1e-12


def test_epochs_can_be_added_on_other_ranks(tmp_path, uninterrupted):
    recipe, run = tiny.write_recipe(tmp_path), tmp_path / "run"
    tiny.train(recipe, "--run-dir", str(run), "--epochs", "2", world_size=2, folder=tmp_path)
    tiny.resume(run, "--epochs", "6", world_size=3, folder=tmp_path)

    def training(path):
        return [r for r in tiny.account(path) if r.get("split") != "test"]

    assert worst(training(run), training(uninterrupted)) < 1e-12


def test_early_stopping_ends_after_the_same_evaluation_on_any_ranks(recipe, tmp_path):
    flags = (*FP64, "--epochs", "30", "--lr", "0.03")
    flags += ("--monitor", "loss", "--patience", "2", "--min-delta", "0.01")
    one = train(recipe, tmp_path, "one", *flags)
    three = train(recipe, tmp_path, "three", *flags, world_size=3)
    assert worst(one, three) < 1e-12
    for name in ("one", "three"):
        *_, stop = read_records(tmp_path / name)
        assert (stop["event"], stop["reason"]) == ("stop", "early stopping")
    losses = [r["loss"] for r in one if r.get("split") == "validation"]
    assert 3 <= len(losses) < 30
    assert len(losses) == first_stop(losses, patience=2, min_delta=0.01)


def test_early_stopping_counts_on_over_a_resume(tmp_path):
    """The evaluations before the stop count, so the run ends where it would have ended."""
    recipe = tiny.write_recipe(tmp_path)
    patient = ("--monitor", "loss", "--patience", "2", "--min-delta", "0.01", "--epochs", "20")
    whole = tmp_path / "whole"
    tiny.train(recipe, "--run-dir", str(whole), *patient, folder=tmp_path)
    *_, stop = tiny.all_records(whole)
    assert stop["reason"] == "early stopping"
    # Stop in the last epoch, when all evaluations but the one that ends the run have been.
    within = stop["step"] - 3
    run = stop_and_resume(recipe, tmp_path, 1, 2, *patient, nth=within)
    tiny.assert_same_training(run, whole)
    *_, last = tiny.all_records(run)
    assert last["reason"] == "early stopping"


def first_stop(losses, patience, min_delta):
    """Return after how many evaluations the words of the settings say to stop."""
    reference, since = math.inf, 0
    for number, loss in enumerate(losses, start=1):
        better = loss < reference - min_delta
        reference, since = (loss, 0) if better else (reference, since + 1)
        if since == patience:
            return number
    return None


def test_evaluations_and_checkpoints_fall_due_by_steps(recipe, tmp_path):
    often = ("--eval-every-steps", "7", "--checkpoint-every-steps", "10")
    train(recipe, tmp_path, "run", *FP64, "--max-steps", "30", *often, world_size=2)
    plain = train(recipe, tmp_path, "plain", *FP64, "--max-steps", "30")
    records = list(read_records(tmp_path / "run"))
    # An epoch has 22 steps; its end evaluates and saves anyway, and so does the end of the run.
    evaluated = [r["step"] for r in records if r.get("split") == "validation"]
    assert evaluated == [7, 14, 21, 22, 28, 30]
    saved = [(r["step"], Path(r["path"]).name) for r in records if r["event"] == "checkpoint"]
    assert saved == [
        (10, "checkpoint_step_10.pt"),
        (20, "checkpoint_step_20.pt"),
        (22, "checkpoint_epoch_1.pt"),
        (30, "checkpoint_step_30.pt"),
    ]
    kept = [r for r in records if r["event"] in ("step", "epoch")]
    assert worst(kept, [r for r in plain if r["event"] in ("step", "epoch")]) < 1e-12


def test_evaluations_and_checkpoints_fall_due_by_epochs(recipe, tmp_path):
    seldom = ("--eval-every-epochs", "2", "--checkpoint-every-epochs", "3")
    train(recipe, tmp_path, "run", "--epochs", "5", *seldom)
    records = list(read_records(tmp_path / "run"))
    assert [r["epoch"] for r in records if r.get("split") == "validation"] == [2, 4, 5]
    assert [r["step"] for r in records if r["event"] == "checkpoint"] == [3 * 22, 5 * 22]


# --- other models and other data ---


def test_a_convolutional_network_takes_the_same_steps_on_any_ranks(tmp_path):
    path = tmp_path / "convnet.py"
    path.write_text(CONVNET)
    one = train(str(path), tmp_path, "one", *FP64)
    assert worst(one, train(str(path), tmp_path, "three", *FP64, world_size=3)) < 1e-12


def test_a_data_set_read_by_workers_trains_as_tensors_in_memory_do(tmp_path):
    """Also with bytes that the recipe augments and normalises."""
    memory, loaded = tmp_path / "memory.py", tmp_path / "loaded.py"
    memory.write_text(CONVNET)
    loaded.write_text(CONVNET + LOADED)
    one = train(str(memory), tmp_path, "one", *FP64)
    for size, workers in ((1, 0), (2, 2)):
        flags = (*FP64, "--num-workers", str(workers))
        other = train(str(loaded), tmp_path, f"ranks{size}", *flags, world_size=size)
        assert worst(one, other) < 1e-12, size


def _train_changed(change, arguments):
    from samestep.cli import main

    if change is not None:
        change()
    sys.exit(main(arguments))


# --- the comparison itself ---


def _mean_of_rank_means():
    """Give each rank the same weight, whatever its share: DDP with an uneven last batch."""
    from samestep.training.step import EagerStep

    original = EagerStep._backward

    def backward(self, block):
        size = block.rows * self._world.world_size
        return original(self, replace(block, global_size=size))

    EagerStep._backward = backward


def _no_gradient_sync():
    """Leave the model unwrapped: N trainings beside each other."""
    from samestep.api import training

    training.NATIVE = replace(training.NATIVE, wrap=lambda model, *_: model)


def _same_data_on_every_rank():
    """Forget the DistributedSampler."""
    from samestep.data import blocks

    original = blocks.share
    blocks.share = lambda positions, rank, world_size: original(positions, 0, world_size)


def _sync_of_the_first_micro_step_alone():
    """Use no_sync() the wrong way round."""
    from samestep.training import step

    step.without_sync = lambda wrapped: contextlib.nullcontext()
    original = step.EagerStep._backward

    def backward(self, block):
        with self._learner.wrapped.no_sync():
            return original(self, block)

    step.EagerStep._backward = backward


def _micro_steps_not_averaged():
    """Add up the means of the micro-steps instead of averaging them."""
    from samestep.training.step import EagerStep

    original = EagerStep._micro_step
    EagerStep._micro_step = lambda self, part, weight, terms: original(self, part, 1.0, terms)


def _order_seeded_by_rank():
    """Let each rank shuffle for itself, as with `seed + rank`."""
    from samestep.data import source

    original = source.epoch_order
    rank = int(os.environ["RANK"])
    source.epoch_order = lambda num, seed, epoch: original(num, seed + rank, epoch)


BUGS = [
    _mean_of_rank_means,
    _no_gradient_sync,
    _same_data_on_every_rank,
    _sync_of_the_first_micro_step_alone,
    _micro_steps_not_averaged,
    _order_seeded_by_rank,
]


@pytest.fixture(scope="module")
def correct(tmp_path_factory):
    folder = tmp_path_factory.mktemp("correct")
    path = folder / "small.py"
    path.write_text(RECIPE)
    return str(path), train(str(path), folder, "run", *FP64)


@pytest.mark.parametrize("plant", [None, *BUGS], ids=lambda plant: getattr(plant, "__name__", "no"))
def test_the_comparison_sees_each_of_the_classic_mistakes(correct, tmp_path, plant):
    """Planted in two ranks with two micro-steps, each is far above the tolerance; none is not.

    Where the ranks' weights drift apart, the run itself ends after its first step.
    """
    recipe, one = correct
    arguments = ["train", recipe, "--run-dir", str(tmp_path / "run"), "--log-every", "1", *FP64]
    arguments += ["--batch-size", "24", "--accumulate", "2"]
    ranks = start_ranks(_train_changed, 2, tmp_path / "output", plant, arguments)
    drifts = plant in (_no_gradient_sync, _sync_of_the_first_micro_step_alone)
    assert ranks.wait() == ([2, 2] if drifts else [0, 0]), ranks.output()
    broken = records_of(tmp_path / "run")
    one = one[:1] if drifts else one
    if plant is None:
        assert worst(one, broken) < 1e-12
    else:
        assert worst(one, broken) > 1e-4
    if plant is _no_gradient_sync:
        # The first loss is still right: it is the gradient norm that tells at once.
        assert broken[0]["loss"] == pytest.approx(one[0]["loss"], rel=1e-12)
        assert broken[0]["grad_norm"] != pytest.approx(one[0]["grad_norm"], rel=1e-2)
