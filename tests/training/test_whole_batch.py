"""A loss over the whole batch is that of one process: on any ranks, in micro-steps, bit for bit."""

import pytest

from tests import tiny
from tests.command_line import refusal

RECIPE = """
import torch
import torch.nn.functional as F
from torch import nn
from samestep import Recipe, Splits

class TwoTowers(nn.Module):
    def __init__(self, norm=nn.Identity, p=0.0):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), norm(), nn.Tanh(), nn.Dropout(p))
        self.image, self.text = nn.Linear(16, 8), nn.Linear(16, 8)
        self.log_scale = nn.Parameter(torch.tensor(1.0))
    def forward(self, x):
        one, other = self.image(self.body(x[:, 0])), self.text(self.body(x[:, 1]))
        return F.normalize(one, dim=1), F.normalize(other, dim=1), self.log_scale.exp()

def clip(outputs, targets):
    one, other, scale = outputs
    assert len(targets) == len(one)
    pairs = torch.arange(len(one))
    logits = scale * one @ other.T
    return (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)) / 2

def dice(outputs, targets):
    there = targets.unsqueeze(1) == torch.arange(8)
    likely = (outputs[2] * outputs[0] * outputs[1]).sigmoid()
    return 1 - (2 * (likely * there).sum() + 1) / (likely.sum() + there.sum() + 1)

def triplets(outputs, targets):
    apart = outputs[2] * torch.cdist(outputs[0], outputs[1])
    alike = targets.unsqueeze(0) == targets.unsqueeze(1)
    farthest = apart.masked_fill(~alike, -1).amax(1)
    nearest = apart.masked_fill(alike, 9).amin(1)
    return F.relu(farthest - nearest + 0.5).mean()

def drawing(outputs, targets):
    one, other, scale = outputs
    wrong = other[torch.randperm(len(other))]  # at random: the same on every rank
    return F.relu(1 - scale * (one * (other - wrong)).sum(1)).mean()

LOSSES = {"clip": clip, "dice": dice, "triplets": triplets, "drawing": drawing}

def data():
    g = torch.Generator().manual_seed(3)
    x, y = torch.randn(79, 2, 6, generator=g), torch.randint(0, 4, (79,), generator=g)
    return Splits(train=(x[:51], y[:51]), validation=(x[51:], y[51:]))

def model():
    return TwoTowers(*MORE)

MORE = ()

def loss(outputs, targets):
    return LOSSES[KIND](outputs, targets)

KIND = "clip"
recipe = Recipe(
    model=model, data=data, loss=loss, metrics={}, loss_over="batch",
    settings={"epochs": 2, "batch_size": 10, "optimizer": "sgd", "lr": 0.3},
)
"""
KINDS = ("clip", "dice", "triplets", "drawing")
FP64 = ("--precision", "fp64", "--log-every", "1")


def written(folder, kind="clip", *changes, name=None):
    text = RECIPE.replace('KIND = "clip"', f'KIND = "{kind}"')
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return tiny.write_recipe(folder, text, name or f"{kind}.py")


PLAIN = ('loss_over="batch",', "")


@pytest.mark.parametrize("precision", ["fp64", "fp16"])
@pytest.mark.parametrize("kind", KINDS[:3])
def test_on_one_rank_it_is_the_plain_loss(kind, precision, tmp_path):
    flags = ("--precision", precision, "--log-every", "1", "--eval-batch-size", "10")
    over = written(tmp_path, kind, name="over.py")
    plain = written(tmp_path, kind, PLAIN, name="plain.py")
    tiny.trained(over, tmp_path / "over", *flags)
    tiny.trained(plain, tmp_path / "plain", *flags)
    tiny.assert_same_training(tmp_path / "over", tmp_path / "plain", 1e-12)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    for kind in KINDS:
        tiny.trained(written(folder, kind), folder / kind, *FP64)
    return folder


@pytest.mark.parametrize(("ranks", "flags"), [(2, ()), (3, ()), (2, ("--micro-batch-size", "3"))])
def test_on_several_ranks_and_in_micro_steps_it_is_that_of_one_process(
    alone, ranks, flags, tmp_path
):
    words = [[alone / f"{k}.py", "--run-dir", tmp_path / k, *FP64, *flags] for k in KINDS]
    tiny.train_all(words, on=ranks, folder=tmp_path)
    for kind in KINDS:
        tiny.assert_same_training(tmp_path / kind, alone / kind, 1e-11)


def test_losses_by_name_and_sums_are_made_over_the_whole_batch_too(tmp_path):
    by_name = "return {k: LOSSES[k](outputs, targets) for k in ('clip', 'dice')}"
    named = ("return LOSSES[KIND](outputs, targets)", by_name)
    weighted = ("metrics={},", 'metrics={}, loss_weights={"dice": 0.5}, reduction="sum",')
    recipe = written(tmp_path, "clip", named, weighted)
    flags = (*FP64, "--lr", "0.05")
    tiny.trained(recipe, tmp_path / "one", *flags)
    for more in ((), ("--micro-batch-size", "3")):
        run = tmp_path / f"two{len(more)}"
        tiny.trained(recipe, run, *flags, *more, on=2)
        tiny.assert_same_training(run, tmp_path / "one", 1e-11)
    step = tiny.events(tmp_path / "one", "step")[0]
    assert step["loss"] == pytest.approx(step["clip"] + 0.5 * step["dice"], rel=1e-12)


def test_with_virtual_ranks_the_bits_are_equal_dropout_and_batchnorm_included(tmp_path):
    odd = ("MORE = ()", "MORE = (lambda: nn.BatchNorm1d(16), 0.3)")
    flags = ("--virtual-ranks", "3", "--log-every", "1", "--batch-size", "12", "--drop-last")
    recipe = written(tmp_path, "clip", odd)
    for more in ((), ("--micro-batch-size", "2")):
        tiny.trained(recipe, tmp_path / f"one{len(more)}", *flags, *more)
        for ranks in (2, 3):
            run = tmp_path / f"on{ranks}-{len(more)}"
            tiny.trained(recipe, run, *flags, *more, on=ranks)
            tiny.assert_same_training(run, tmp_path / f"one{len(more)}", 0)


def test_micro_steps_move_the_statistics_of_batchnorm_once(tmp_path):
    recipe = written(tmp_path, "clip", ("MORE = ()", "MORE = (lambda: nn.BatchNorm1d(16),)"))
    tiny.trained(recipe, tmp_path / "run", "--micro-batch-size", "5", "--max-steps", "4")
    counted = tiny.last_state(tmp_path / "run")["model"]["body.1.num_batches_tracked"]
    assert counted == 4 * 2 * 2  # 2 towers, 2 micro-steps


IN_LOSS = "net = TwoTowers()\nmodel = lambda: net\ndef loss(outputs, targets):\n    return "
READS_WEIGHTS = ("def loss(outputs, targets):\n    return ", IN_LOSS + "net.image.weight.sum() + ")


@pytest.mark.parametrize(
    ("change", "flags"),
    [
        (('loss_over="batch"', 'loss_over="ranks"'), ()),
        (("metrics={}", "metrics={}, loss_terms=lambda b: 1"), ()),
        (("self.log_scale.exp()", "self.log_scale.exp().repeat(3)"), ()),
        (("self.log_scale.exp()", "x.new_ones(len(x), 8 + len(x))"), ("--micro-batch-size", "4")),
        (("settings={", 'settings={"engine": "lightning", '), ()),
        (READS_WEIGHTS, ()),
        (("F.normalize(other, dim=1), self", "'a name', self"), ()),
        (("def forward(self, x):", "@torch.no_grad()\n    def forward(self, x):"), ()),
    ],
    ids=[
        *("unknown", "with loss_terms", "no row a sample", "unequal rows", "lightning"),
        *("weights in the loss", "a name", "detached"),
    ],
)
def test_what_cannot_be_put_together_is_refused(change, flags, tmp_path):
    recipe = written(tmp_path, "dice", change)
    assert refusal(
        "train", str(recipe), "--run-dir", str(tmp_path / "run"), *flags, folder=tmp_path
    )
