"""The promise of the same step, tried with real processes."""

import contextlib
import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from samestep import read_records
from tests import tiny
from tests.faults import Fault
from tests.processes import free_port, run_ranks, start_ranks

pytestmark = pytest.mark.xdist_group("trajectory")  # the runs of one process are shared

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
def recipe(tmp_path: Path) -> Path:
    return tiny.write_recipe(tmp_path, RECIPE, "small.py")


def train(recipe: Path, folder: Path, name: str, *flags: str, on: int = 1):
    tiny.trained(recipe, folder / name, "--log-every", "1", *flags, on=on)
    return records_of(folder / name)


def records_of(run: Path):
    return tiny.events(run, "step", "evaluation", "epoch")


def steps(records, name: str):
    return [r[name] for r in records if r["event"] == "step"]


def stop_and_resume(
    recipe: Path, folder: Path, before: int, after: int, *flags: str, nth: int = 15
) -> Path:
    """Stop a run by SIGTERM to one rank within its second epoch or later, and go on with it."""
    run = folder / "run"
    if before > 1:
        tiny.set_pace(recipe, 0.02)  # so that the ranks meet before the run is over
    fault = Fault("after a step", nth=nth, signum=signal.SIGTERM, rank=before - 1)
    tiny.struck(recipe, run, fault, *flags, on=before)
    *_, last = tiny.all_records(run)
    assert (last["event"], last["reason"]) == ("stop", "SIGTERM")
    assert nth <= last["step"]
    tiny.set_pace(recipe, 0)
    tiny.resumed(run, on=after)
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
    assert fields
    return max(abs(a - b) / max(abs(a), abs(b), 1e-300) for a, b in fields)


# --- the same training on any ranks, and cut in other ways ---

CLIPPED = ("--batch-size", "32", "--clip-norm", "0.05", "--optimizer", "sgd")
PATIENT = ("--monitor", "loss", "--patience", "2", "--min-delta", "0.01")
WHOLE = (*FP64, "--batch-size", "32")
# The trainings of one process: their recipes and flags.
ALONE = {
    "clipped": ("small", (*FP64, *CLIPPED)),
    "single precision": ("small", ("--precision", "fp32", *CLIPPED)),
    "whole": ("small", WHOLE),
    "drop last": ("small", (*FP64, "--drop-last")),
    "cosine": (
        "small",
        (*FP64, "--max-steps", "30", "--schedule", "cosine", "--warmup-steps", "4"),
    ),
    "early stopping": ("small", (*FP64, "--epochs", "30", "--lr", "0.03", *PATIENT)),
    "images": ("convnet", FP64),
    "usual": ("small", FP64),
}
# Which of them is trained on how many ranks, and with which recipe or flags instead.
OTHERS = [
    ("clipped", 2),
    ("single precision", 3),
    ("drop last", 3),
    ("cosine", 3),
    ("early stopping", 3),
    ("images", 3),
    # 32 samples: 11 + 11 + 10; 4 at a time on two ranks; 5 + 5 + 1 on one of three.
    ("whole", 1, "small", (*WHOLE, "--accumulate", "3")),
    ("whole", 2, "small", (*WHOLE, "--micro-batch-size", "4")),
    ("whole", 3, "small", (*WHOLE, "--micro-batch-size", "5")),
    ("whole", 2, "small", (*FP64, "--batch-size-per-rank", "16")),
    # A data set that is read in the process and by workers: bytes that are augmented, normalised.
    ("images", 1, "loaded", FP64),
    ("images", 2, "loaded", (*FP64, "--num-workers", "2")),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Train all of ALONE in this process, and all of OTHERS by one start of ranks a world size."""
    folder = tmp_path_factory.mktemp("runs")
    for name, text in (("small", RECIPE), ("convnet", CONVNET), ("loaded", CONVNET + LOADED)):
        tiny.write_recipe(folder, text, f"{name}.py")
    for name, (file, flags) in ALONE.items():
        train(folder / f"{file}.py", folder, name, *flags)
    worlds: dict[int, list] = {}
    for number, (name, ranks, *how) in enumerate(OTHERS):
        file, flags = how or ALONE[name]
        run = ("--run-dir", folder / str(number), "--log-every", "1")
        worlds.setdefault(ranks, []).append([folder / f"{file}.py", *run, *flags])
    for ranks, words in worlds.items():
        tiny.train_all(words, on=ranks, folder=folder)
    return folder


@pytest.mark.parametrize("number", range(len(OTHERS)), ids=lambda n: f"{OTHERS[n][0]} {n}")
def test_it_is_the_same_training_on_any_ranks_in_any_micro_steps(runs, number):
    name = OTHERS[number][0]
    tolerance = 1e-5 if name == "single precision" else 1e-12
    assert worst(records_of(runs / name), records_of(runs / str(number))) < tolerance
    if "--clip-norm" in ALONE[name][1]:
        ours, theirs = (tiny.last_state(runs / run)["model"] for run in (str(number), name))
        for key, weight in theirs.items():
            torch.testing.assert_close(ours[key], weight, rtol=tolerance, atol=tolerance)


def test_drop_last_leaves_out_the_samples_of_the_incomplete_batch(runs):
    one = records_of(runs / "drop last")
    assert [r["samples"] for r in one if r["event"] == "epoch"] == [504, 504]
    assert steps(one, "samples") == [24 * k for k in range(1, 43)]


def test_the_last_incomplete_batch_counts_its_samples_alone(runs):
    one = records_of(runs / "usual")
    assert [r["samples"] for r in one if r["event"] == "epoch"] == [509, 509]
    samples = steps(one, "samples")
    assert samples[:22] == [24 * k for k in range(1, 22)] + [509]
    assert samples[-1] == 2 * 509
    weights = 21 * [24] + [5]
    mean = sum(w * x for w, x in zip(weights, steps(one, "loss")[:22], strict=True)) / 509
    first = next(r for r in one if r["event"] == "epoch")
    assert first["loss"] == pytest.approx(mean, rel=1e-13)


def test_a_schedule_over_steps_ends_within_an_epoch(runs):
    one = records_of(runs / "cosine")
    lrs = steps(one, "lr")
    assert len(lrs) == 30
    assert lrs[:5] == pytest.approx([0.002, 0.004, 0.006, 0.008, 0.01])
    assert lrs[4:] == sorted(lrs[4:], reverse=True)
    assert 0 < lrs[-1] < 0.0001
    epochs = [(r["epoch"], r["samples"]) for r in one if r["event"] == "epoch"]
    assert epochs == [(1, 509), (2, 8 * 24)]


def test_clipping_changes_the_training_and_the_recorded_norm_is_the_one_before(recipe, tmp_path):
    flags = (*FP64, "--max-steps", "5", "--optimizer", "sgd")
    free = train(recipe, tmp_path, "free", *flags)
    clipped = train(recipe, tmp_path, "clipped", *flags, "--clip-norm", "0.001")
    assert worst(free, clipped) > 1e-6
    assert clipped[0]["grad_norm"] == pytest.approx(free[0]["grad_norm"], rel=1e-14)
    assert min(steps(clipped, "grad_norm")) > 0.01


def test_early_stopping_ends_after_as_many_evaluations_as_the_settings_say(runs):
    *_, stop = read_records(runs / "early stopping")
    assert (stop["event"], stop["reason"]) == ("stop", "early stopping")
    one = records_of(runs / "early stopping")
    losses = [r["loss"] for r in one if r.get("split") == "validation"]
    assert 3 <= len(losses) < 30
    assert len(losses) == first_stop(losses, patience=2, min_delta=0.01)


def first_stop(losses, patience, min_delta):
    """Return after how many evaluations the words of the settings say to stop."""
    reference, since = math.inf, 0
    for number, loss in enumerate(losses, start=1):
        better = loss < reference - min_delta
        reference, since = (loss, 0) if better else (reference, since + 1)
        if since == patience:
            return number
    return None


# --- stopping and going on ---


@pytest.mark.parametrize(("before", "after"), [(1, 3), (2, 1)])
def test_a_run_stopped_within_an_epoch_goes_on_as_if_never_stopped_on_other_ranks(
    tmp_path, uninterrupted, before, after
):
    run = stop_and_resume(tiny.write_recipe(tmp_path), tmp_path, before, after)
    tiny.assert_same_training(run, uninterrupted)


@pytest.mark.parametrize("ranks", [1, 2])
def test_on_as_many_ranks_a_resumed_run_with_dropout_is_the_same_to_the_last_bit(tmp_path, ranks):
    text = tiny.RECIPE.replace("nn.Tanh()", "nn.Tanh(), nn.Dropout(0.5)")
    assert text != tiny.RECIPE
    recipe = tiny.write_recipe(tmp_path, text)
    tiny.trained(recipe, tmp_path / "whole", on=ranks)
    run = stop_and_resume(recipe, tmp_path, ranks, ranks)
    tiny.assert_same_training(run, tmp_path / "whole", tolerance=0)


def test_a_run_that_reached_its_last_step_can_be_made_longer_on_other_ranks(tmp_path):
    """Its end leaves an evaluation and a checkpoint of its own; all else is as in one go."""
    recipe = tiny.write_recipe(tmp_path)
    whole, run = tmp_path / "whole", tmp_path / "run"
    tiny.trained(recipe, whole, "--batch-size", "13", "--max-steps", "40")
    tiny.trained(recipe, run, "--batch-size", "13", "--max-steps", "13", on=2)
    tiny.resumed(run, "--max-steps", "40")

    def steps_and_whole_epochs(path):
        return [
            r
            for r in tiny.account(path)
            if r["event"] == "step" or (r["step"] != 13 and r.get("split") != "test")
        ]

    assert worst(steps_and_whole_epochs(run), steps_and_whole_epochs(whole)) < 1e-12


def test_epochs_can_be_added_on_other_ranks(tmp_path, uninterrupted):
    run = tmp_path / "run"
    tiny.trained(tiny.write_recipe(tmp_path), run, "--epochs", "2")
    tiny.resumed(run, "--epochs", "6", on=2)

    def training(path):
        return [r for r in tiny.account(path) if r.get("split") != "test"]

    assert worst(training(run), training(uninterrupted)) < 1e-12


def test_early_stopping_counts_on_over_a_resume(tmp_path):
    """The evaluations before the stop count, so the run ends where it would have ended."""
    recipe, whole = tiny.write_recipe(tmp_path), tmp_path / "whole"
    tiny.trained(recipe, whole, *PATIENT, "--epochs", "20")
    *_, stop = tiny.all_records(whole)
    assert stop["reason"] == "early stopping"
    # Stop in the last epoch, when all evaluations but the one that ends the run have been.
    within = stop["step"] - 3
    run = stop_and_resume(recipe, tmp_path, 1, 2, *PATIENT, "--epochs", "20", nth=within)
    tiny.assert_same_training(run, whole)
    *_, last = tiny.all_records(run)
    assert last["reason"] == "early stopping"


def test_evaluations_and_checkpoints_fall_due_by_steps(recipe, tmp_path):
    often = ("--eval-every-steps", "7", "--checkpoint-every-steps", "10")
    train(recipe, tmp_path, "run", *FP64, "--max-steps", "30", *often)
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


# --- the comparison itself ---


def _no_bug(_patch):
    pass


def _mean_of_rank_means(patch):
    """Give each rank the same weight, whatever its share: DDP with an uneven last batch."""
    from samestep.training.step import EagerStep

    original = EagerStep._backward

    def backward(self, block):
        size = block.rows * self._world.world_size
        return original(self, replace(block, global_size=size))

    patch.setattr(EagerStep, "_backward", backward)


def _no_gradient_sync(patch):
    """Leave the model unwrapped: N trainings beside each other."""
    from samestep.api import training

    patch.setattr(training, "NATIVE", replace(training.NATIVE, wrap=lambda model, *_: model))


def _same_data_on_every_rank(patch):
    """Forget the DistributedSampler."""
    from samestep.data import blocks

    original = blocks.share
    patch.setattr(blocks, "share", lambda positions, rank, size: original(positions, 0, size))


def _sync_of_the_first_micro_step_alone(patch):
    """Use no_sync() the wrong way round."""
    from samestep.training import step

    patch.setattr(step, "without_sync", lambda wrapped: contextlib.nullcontext())
    original = step.EagerStep._backward

    def backward(self, block):
        with self._learner.wrapped.no_sync():
            return original(self, block)

    patch.setattr(step.EagerStep, "_backward", backward)


def _micro_steps_not_averaged(patch):
    """Add up the means of the micro-steps instead of averaging them."""
    from samestep.training.step import EagerStep

    original = EagerStep._micro_step
    changed = lambda self, part, weight, terms: original(self, part, 1.0, terms)  # noqa: E731
    patch.setattr(EagerStep, "_micro_step", changed)


def _order_seeded_by_rank(patch):
    """Let each rank shuffle for itself, as with `seed + rank`."""
    from samestep.data import source

    original, rank = source.epoch_order, int(os.environ["RANK"])
    patch.setattr(
        source,
        "epoch_order",
        lambda num, seed, *rest, **how: original(num, seed + rank, *rest, **how),
    )


BUGS = [
    _mean_of_rank_means,
    _same_data_on_every_rank,
    _micro_steps_not_averaged,
    _order_seeded_by_rank,
]
# Where the ranks' weights drift apart, the run itself ends after its first step.
DRIFTING = [_no_gradient_sync, _sync_of_the_first_micro_step_alone]


def _train_planted(plants, trainings, ports):
    for plant, words, port in zip(plants, trainings, ports, strict=True):
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            tiny.train_one_by_one([words], [port])


def planted(runs: Path, run: Path) -> list[str]:
    """Return the words of a training with two micro-steps."""
    flags = ("--log-every", "1", *FP64, "--batch-size", "24", "--accumulate", "2")
    return [str(runs / "small.py"), "--run-dir", str(run), *flags]


def test_the_comparison_sees_each_of_the_classic_mistakes(runs, tmp_path):
    """Planted in two ranks, each is far above the tolerance; none is not."""
    plants, one = [_no_bug, *BUGS], records_of(runs / "usual")
    places = [tmp_path / plant.__name__ for plant in plants]
    words, ports = [planted(runs, run) for run in places], [free_port() for _ in plants]
    run_ranks(_train_planted, 2, tmp_path / "output", plants, words, ports)
    found = [worst(one, records_of(run)) for run in places]
    assert found[0] < 1e-12
    assert min(found[1:]) > 1e-4, found


@pytest.mark.parametrize("plant", DRIFTING)
def test_the_run_itself_sees_weights_that_drift_apart(runs, tmp_path, plant):
    words = planted(runs, tmp_path / "run")
    ranks = start_ranks(_train_planted, 2, tmp_path / "output", [plant], [words], [free_port()])
    assert ranks.wait() == [2, 2], ranks.output()
    one, broken = records_of(runs / "usual")[:1], records_of(tmp_path / "run")
    assert worst(one, broken) > 1e-4
    if plant is _no_gradient_sync:
        # The first loss is still right: it is the gradient norm that tells at once.
        assert broken[0]["loss"] == pytest.approx(one[0]["loss"], rel=1e-12)
        assert broken[0]["grad_norm"] != pytest.approx(one[0]["grad_norm"], rel=1e-2)
