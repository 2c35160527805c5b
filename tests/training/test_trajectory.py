"""The promise of the same step, tried with real processes."""

import math
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from samestep import read_records
from samestep.core.data import order, source
from samestep.core.session import training_run
from samestep.core.training.step import EagerStep
from tests import tiny
from tests.faults import Fault
from tests.processes import free_port, run_ranks, start_ranks
from tests.training.stops import stop_all

pytestmark = pytest.mark.xdist_group("trajectory")  # the runs of one process are shared

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
def normalise(images): return images.unsqueeze(1).double() / 255 - 0.5
recipe = Recipe(
    model=model, data=data, augment=flip, transform=normalise,
    settings={"epochs": 3, "batch_size": 12, "lr": 0.01, "precision": "fp64", "log_every": 1},
)
"""
LOADED = """
from dataclasses import replace
class Images(torch.utils.data.Dataset):
    def __init__(self, images, labels): self.images, self.labels = images, labels
    def __len__(self): return len(self.images)
    def __getitem__(self, index): return self.images[index], int(self.labels[index])
def loaded():
    splits = data()
    return Splits(train=Images(*splits.train), validation=Images(*splits.validation))
recipe = replace(recipe, data=loaded)
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return tiny.write_recipe(tmp_path)


def train(recipe: Path, folder: Path, name: str, *flags: str):
    tiny.trained(recipe, folder / name, *flags)
    return records_of(folder / name)


def records_of(run: Path):
    return tiny.events(run, "step", "evaluation", "epoch")


def steps(records, name: str):
    return [r[name] for r in records if r["event"] == "step"]


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


COMPLEX = tiny.RECIPE.replace(
    "def model(options):",
    "class Waves(nn.Linear):\n    def forward(self, x):\n"
    "        return super().forward(x.to(self.weight.dtype)).abs()\n\ndef model(options):",
).replace("nn.Linear(8, options.hidden)", "Waves(8, options.hidden, dtype=torch.complex128)")

ONE, TWO = ("--epochs", "1"), ("--epochs", "2")
WHOLE = (*TWO, "--batch-size", "32")
CLIPPED = (*WHOLE, "--clip-norm", "0.05", "--optimizer", "sgd")
PATIENT = ("--epochs", "20", "--stop-monitor", "loss", "--patience", "2", "--min-delta", "0.01")
# The trainings of one process: their recipes and flags.
ALONE = {
    "clipped": ("tiny", CLIPPED),
    "single precision": ("tiny", ("--precision", "fp32", *CLIPPED)),
    "whole": ("tiny", WHOLE),
    "drop last": ("tiny", (*TWO, "--drop-last")),
    "cosine": ("tiny", ("--max-steps", "30", "--schedule", "cosine", "--warmup-steps", "4")),
    "early stopping": ("tiny", PATIENT),
    "images": ("convnet", TWO),
    "complex weights": ("complex", ONE),
    "usual": ("tiny", TWO),
}
# Which of them is trained on how many ranks, and with which recipe or flags instead.
OTHERS = [
    ("clipped", 2),
    ("cosine", 2),
    ("early stopping", 2),
    ("complex weights", 2),
    ("single precision", 3),
    ("drop last", 3),
    # 32 samples: 11 + 11 + 10, and 5 + 5 + 1 on one of three.
    ("whole", 1, "tiny", (*WHOLE, "--accumulate", "3")),
    ("whole", 3, "tiny", (*WHOLE, "--micro-batch-size", "5")),
    # A data set that is read in the process and by workers: bytes that are augmented, normalised.
    ("images", 1, "loaded", TWO),
    ("images", 2, "loaded", (*TWO, "--num-workers", "2")),
]
# A run of two ranks that ends within an epoch.
SHORT = ("--batch-size", "13", "--max-steps", "13")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Train all of ALONE in this process, and all of OTHERS by one start of ranks a world size."""
    folder = tmp_path_factory.mktemp("runs")
    texts = {"tiny": tiny.RECIPE, "complex": COMPLEX}
    for name, text in (texts | {"convnet": CONVNET, "loaded": CONVNET + LOADED}).items():
        tiny.write_recipe(folder, text, f"{name}.py")
    for name, (file, flags) in ALONE.items():
        tiny.trained(folder / f"{file}.py", folder / name, *flags)
    worlds: dict[int, list] = {2: [[folder / "tiny.py", "--run-dir", folder / "13", *SHORT]]}
    for number, (name, ranks, *how) in enumerate(OTHERS):
        file, flags = how or ALONE[name]
        words = [folder / f"{file}.py", "--run-dir", folder / str(number), *flags]
        worlds.setdefault(ranks, []).append(words)
    for words in worlds.pop(1):
        tiny.train_here(*map(str, words))
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


def test_incomplete_batches_schedules_and_early_stopping_end_where_they_should(runs):
    one = records_of(runs / "cosine")
    lrs = steps(one, "lr")
    assert len(lrs) == 30
    assert lrs[:5] == pytest.approx([0.002, 0.004, 0.006, 0.008, 0.01])
    assert lrs[4:] == sorted(lrs[4:], reverse=True)
    assert 0 < lrs[-1] < 0.0001
    epochs = [(r["epoch"], r["samples"]) for r in one if r["event"] == "epoch"]
    assert epochs == [(1, 131), (2, 131), (3, 8 * 12)]
    *_, stop = read_records(runs / "early stopping")
    assert (stop["event"], stop["reason"]) == ("stop", "early stopping")
    one = records_of(runs / "early stopping")
    losses = [r["loss"] for r in one if r.get("split") == "validation"]
    assert 3 <= len(losses) < 20
    assert len(losses) == first_stop(losses, patience=2, min_delta=0.01)
    one = records_of(runs / "usual")
    assert [r["samples"] for r in one if r["event"] == "epoch"] == [131, 131]
    samples = steps(one, "samples")
    assert samples[:11] == [12 * k for k in range(1, 11)] + [131]
    assert samples[-1] == 2 * 131
    weights = 10 * [12] + [11]
    mean = sum(w * x for w, x in zip(weights, steps(one, "loss")[:11], strict=True)) / 131
    first = next(r for r in one if r["event"] == "epoch")
    assert first["loss"] == pytest.approx(mean, rel=1e-13)
    one = records_of(runs / "drop last")
    assert [r["samples"] for r in one if r["event"] == "epoch"] == [120, 120]
    assert steps(one, "samples") == [12 * k for k in range(1, 21)]


def first_stop(losses, patience, min_delta):
    reference, since = math.inf, 0
    for number, loss in enumerate(losses, start=1):
        better = loss < reference - min_delta
        reference, since = (loss, 0) if better else (reference, since + 1)
        if since == patience:
            return number
    return None


def test_what_one_process_began_goes_on_on_two_ranks(runs, recipe, tmp_path, uninterrupted):
    stopped, counting, added = (tmp_path / name for name in ("stopped", "counting", "added"))
    *_, end = tiny.all_records(runs / "early stopping")
    # In the last epoch, when all evaluations but the one that ends the run have been.
    late = Fault("after a step", nth=end["step"] - 3, signum=signal.SIGTERM)
    early = replace(late, nth=15)
    stops = [
        (early, (recipe, "--run-dir", stopped)),
        (late, (recipe, "--run-dir", counting, *PATIENT)),
    ]
    stop_all(stops, on=1, folder=tmp_path)
    tiny.trained(recipe, added, *TWO)
    again = [[run, "--resume"] for run in (stopped, counting)]
    tiny.train_all([*again, [added, "--resume", "--epochs", "6"]], on=2, folder=tmp_path)
    tiny.assert_same_training(stopped, uninterrupted)
    tiny.assert_same_training(counting, runs / "early stopping")
    *_, last = tiny.all_records(counting)
    assert last["reason"] == "early stopping"

    def training(path):
        return [r for r in tiny.account(path) if r.get("split") != "test"]

    assert worst(training(added), training(uninterrupted)) < 1e-12


def test_a_run_that_reached_its_last_step_can_be_made_longer_on_other_ranks(runs, tmp_path):
    whole, run, longer = tmp_path / "whole", tmp_path / "run", ("--max-steps", "40")
    tiny.trained(runs / "tiny.py", whole, *SHORT, *longer)
    shutil.copytree(runs / "13", run)
    tiny.resumed(run, *longer)

    def steps_and_whole_epochs(path):
        return [
            r
            for r in tiny.account(path)
            if r["event"] == "step" or (r["step"] != 13 and r.get("split") != "test")
        ]

    assert worst(steps_and_whole_epochs(run), steps_and_whole_epochs(whole)) < 1e-12


def test_evaluations_and_checkpoints_fall_due_and_change_nothing(recipe, tmp_path):
    often = ("--eval-every-steps", "7", "--checkpoint-every-steps", "10")
    one = train(recipe, tmp_path, "run", "--max-steps", "30", *often)
    plain = train(recipe, tmp_path, "plain", "--max-steps", "30")
    # An epoch has 11 steps; its end evaluates and saves anyway, and so does the end of the run.
    assert [r["step"] for r in one if r.get("split") == "validation"] == [7, 11, 14, 21, 22, 28, 30]
    saved = [Path(r["path"]).stem for r in tiny.events(tmp_path / "run", "checkpoint")]
    places = ("step_10", "epoch_1", "step_20", "epoch_2", "step_30")
    assert saved == [f"checkpoint_{place}" for place in places]
    kept, theirs = ([r for r in run if r["event"] in ("step", "epoch")] for run in (one, plain))
    assert worst(kept, theirs) < 1e-12
    seldom = ("--eval-every-epochs", "2", "--checkpoint-every", "3epoch,1000steps")
    one = train(recipe, tmp_path, "seldom", "--epochs", "5", *seldom)
    assert [r["epoch"] for r in one if r.get("split") == "validation"] == [2, 4, 5]
    saved = tiny.events(tmp_path / "seldom", "checkpoint")
    assert [record["step"] for record in saved] == [3 * 11, 5 * 11]


def _no_bug(_patch): ...


def _mean_of_rank_means(patch):
    """Give each rank the same weight, whatever its share: DDP with an uneven last batch."""
    original = EagerStep._backward

    def backward(self, block):
        size = block.rows * self._world.world_size
        return original(self, replace(block, global_size=size))

    patch.setattr(EagerStep, "_backward", backward)


def _no_gradient_sync(patch):
    """Leave the model unwrapped: N trainings beside each other."""
    unwrapped = replace(training_run.NATIVE, wrap=lambda model, *_: model)
    patch.setattr(training_run, "NATIVE", unwrapped)


def _same_data_on_every_rank(patch):
    original = order.share
    patch.setattr(order, "share", lambda positions, rank, size: original(positions, 0, size))


def _micro_steps_not_averaged(patch):
    original = EagerStep._micro_step
    changed = lambda self, part, weight: original(self, part, 1.0)  # noqa: E731
    patch.setattr(EagerStep, "_micro_step", changed)


def _order_seeded_by_rank(patch):
    """Let each rank shuffle for itself, as with `seed + rank`."""
    original, rank = source.epoch_order, int(os.environ["RANK"])
    seeded = lambda num, seed, *rest, **how: original(num, seed + rank, *rest, **how)  # noqa: E731
    patch.setattr(source, "epoch_order", seeded)


BUGS = [_mean_of_rank_means, _same_data_on_every_rank]
BUGS += [_micro_steps_not_averaged, _order_seeded_by_rank]


def _train_planted(plants, trainings, ports):
    for plant, words, port in zip(plants, trainings, ports, strict=True):
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            tiny.train_one_by_one([words], [port])


def planted(runs: Path, run: Path) -> list[str]:
    return [str(runs / "tiny.py"), "--run-dir", str(run), *ONE, "--accumulate", "2"]


def test_the_comparison_sees_the_classic_mistakes_and_the_run_a_drift(runs, tmp_path):
    plants, one = [_no_bug, *BUGS], train(runs / "tiny.py", tmp_path, "one", *ONE)
    places = [tmp_path / plant.__name__ for plant in plants]
    words, ports = [planted(runs, run) for run in places], [free_port() for _ in plants]
    run_ranks(_train_planted, 2, tmp_path / "output", plants, words, ports)
    found = [worst(one, records_of(run)) for run in places]
    assert found[0] < 1e-12
    assert min(found[1:]) > 1e-4, found
    plants, words = [_no_gradient_sync], [planted(runs, tmp_path / "run")]
    ranks = start_ranks(_train_planted, 2, tmp_path / "output", plants, words, [free_port()])
    assert ranks.wait() == [2, 2], ranks.output()
    right, (broken,) = one[0], records_of(tmp_path / "run")
    assert broken["loss"] == pytest.approx(right["loss"], rel=1e-12)
    assert broken["grad_norm"] != pytest.approx(right["grad_norm"], rel=1e-2)
