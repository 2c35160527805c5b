"""A loss over the whole batch is that of one process: on any ranks, in micro-steps, bit for bit."""

import pytest

from tests import tiny

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
def drawing(outputs, targets):
    one, other, scale = outputs
    wrong = other[torch.randperm(len(other))]  # at random: the same on every rank
    return F.relu(1 - scale * (one * (other - wrong)).sum(1)).mean()
LOSSES = {"clip": clip, "dice": dice, "drawing": drawing}
def data():
    g = torch.Generator().manual_seed(3)
    x, y = torch.randn(79, 2, 6, generator=g), torch.randint(0, 4, (79,), generator=g)
    return Splits(train=(x[:51], y[:51]), validation=(x[51:], y[51:]))
def model(): return TwoTowers(*MORE)
MORE = ()
def loss(outputs, targets):
    return LOSSES[KIND](outputs, targets)
KIND = "clip"
recipe = Recipe(
    model=model, data=data, loss=loss, metrics={}, loss_over="batch",
    settings={"epochs": 1, "batch_size": 10, "optimizer": "sgd", "lr": 0.3},
)
"""
KINDS = ("clip", "dice", "drawing")
FP64 = ("--precision", "fp64", "--log-every", "1")


def written(folder, kind="clip", *changes, name=None):
    text = tiny.changed(RECIPE.replace('KIND = "clip"', f'KIND = "{kind}"'), *changes)
    return tiny.write_recipe(folder, text, name or f"{kind}.py")


PLAIN = ('loss_over="batch",', "")


@pytest.mark.parametrize(("kind", "precision"), [("clip", "fp16"), ("dice", "fp64")])
def test_on_one_rank_it_is_the_plain_loss(kind, precision, tmp_path):
    flags = ("--precision", precision, "--log-every", "1", "--eval-batch-size", "10")
    over = written(tmp_path, kind, name="over.py")
    plain = written(tmp_path, kind, PLAIN, name="plain.py")
    tiny.trained(over, tmp_path / "over", *flags)
    tiny.trained(plain, tmp_path / "plain", *flags)
    tiny.assert_same_training(tmp_path / "over", tmp_path / "plain", 1e-12)


BY_NAME = "return {k: LOSSES[k](outputs, targets) for k in ('clip', 'dice')}"
NAMED = (
    ("return LOSSES[KIND](outputs, targets)", BY_NAME),
    ("metrics={},", 'metrics={}, loss_weights={"dice": 0.5}, reduction="sum",'),
)
ODD = ("MORE = ()", "MORE = (lambda: nn.BatchNorm1d(16), 0.3)")
VIRTUAL = ("--virtual-ranks", "3", "--log-every", "1", "--batch-size", "12", "--drop-last")
# A recipe each, and its flags.
TRAININGS = dict.fromkeys(KINDS, FP64) | {
    "named": (*FP64, "--lr", "0.05"),
    "virtual": VIRTUAL,
    "virtual, in micro-steps": (*VIRTUAL, "--micro-batch-size", "2"),
}
MICRO = ("--micro-batch-size", "3")
# On how many ranks they are trained too, and with which flags more.
OTHERS = [
    *((2, name, ()) for name in ("dice", "named", "virtual")),
    *((3, name, ()) for name in ("clip", "drawing", "virtual, in micro-steps")),
    *((2, name, MICRO) for name in ("clip", "named")),
]


def test_on_several_ranks_it_is_that_of_one_and_batchnorm_moves_once(tmp_path):
    """With virtual ranks to the last bit, dropout and batch normalisation included."""
    changes = {"named": NAMED} | dict.fromkeys(("virtual", "virtual, in micro-steps"), (ODD,))
    recipes = {}
    for name, flags in TRAININGS.items():
        kind = name if name in KINDS else "clip"
        recipes[name] = written(tmp_path, kind, *changes.get(name, ()), name=f"{name}.py")
        tiny.trained(recipes[name], tmp_path / name, *flags)
    words: dict[int, list] = {}
    for number, (ranks, name, more) in enumerate(OTHERS):
        how = [recipes[name], "--run-dir", tmp_path / str(number), *TRAININGS[name], *more]
        words.setdefault(ranks, []).append(how)
    for ranks, some in words.items():
        tiny.train_all(some, on=ranks, folder=tmp_path)
    for number, (_, name, _) in enumerate(OTHERS):
        tolerance = 0 if "virtual" in name else 1e-11
        tiny.assert_same_training(tmp_path / str(number), tmp_path / name, tolerance)
    step = tiny.events(tmp_path / "named", "step")[0]
    assert step["loss"] == pytest.approx(step["clip"] + 0.5 * step["dice"], rel=1e-12)
    recipe = written(tmp_path, "clip", ("MORE = ()", "MORE = (lambda: nn.BatchNorm1d(16),)"))
    tiny.trained(recipe, tmp_path / "run", "--micro-batch-size", "5", "--max-steps", "4")
    counted = tiny.last_state(tmp_path / "run")["model"]["body.1.num_batches_tracked"]
    assert counted == 4 * 2 * 2  # 2 towers, 2 micro-steps


IN_LOSS = "net = TwoTowers()\nmodel = lambda: net\ndef loss(outputs, targets):\n    return "
READS_WEIGHTS = ("def loss(outputs, targets):\n    return ", IN_LOSS + "net.image.weight.sum() + ")


UNFIT = {
    "unknown": ('loss_over="batch"', 'loss_over="ranks"'),
    "with loss_terms": ("metrics={}", "metrics={}, loss_terms=lambda b: 1"),
    "no row a sample": ("self.log_scale.exp()", "self.log_scale.exp().repeat(3)"),
    "unequal rows": ("self.log_scale.exp()", "x.new_ones(len(x), 8 + len(x))"),
    "lightning": ("settings={", 'settings={"engine": "lightning", '),
    "weights in the loss": READS_WEIGHTS,
    "a name": ("F.normalize(other, dim=1), self", "'a name', self"),
    "detached": ("def forward(self, x):", "@torch.no_grad()\n    def forward(self, x):"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_cannot_be_put_together_is_refused(name, tmp_path, refused):
    recipe = written(tmp_path, "dice", UNFIT[name])
    flags = ("--micro-batch-size", "4") if name == "unequal rows" else ()
    refused("train", str(recipe), "--run-dir", str(tmp_path / "run"), *flags)
