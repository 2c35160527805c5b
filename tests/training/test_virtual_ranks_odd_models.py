"""Virtual ranks and models that write where they should not: the same bits, or refused by name."""

import pytest

from tests import tiny

RECIPE = """
import torch, torchmetrics
from dataclasses import dataclass
from torch import nn
from samestep import Recipe, Splits

@dataclass(frozen=True)
class Options:
    kind: str = ""

def data(options):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(60, 8, generator=generator)
    y = x[:, :3].argmax(dim=1)
    return Splits(train=(x[:43], y[:43]), validation=(x[43:], y[43:]))

class Odd(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.head, self.teacher = kind, nn.Linear(8, 3), nn.Linear(8, 3)
        self.teacher.requires_grad_(False)
        self.words = nn.Embedding(5, 8, max_norm=0.5 if kind == "renormed" else None)
        self.norm = nn.SyncBatchNorm(8) if kind == "synchronised" else nn.Identity()
        self.register_buffer("calls", torch.tensor(0.0))
        self.register_buffer("most", torch.tensor(float("-inf")))

    def forward(self, x):
        hidden = self.norm(x + self.words((x.sum(dim=1) > 0).long()))
        out = self.head(hidden)
        if self.kind == "counts":
            self.calls += 1
            out = out * (1 + self.calls / 100)
        if self.kind == "most":
            self.most = torch.maximum(self.most, out.detach().max())
        if self.kind == "teacher" and self.training:
            self.teacher.weight.data.mul_(0.9).add_(self.head.weight.data, alpha=0.1)
        return out

class Scaled(nn.Module):
    def __init__(self, moves):
        super().__init__()
        self.moves = moves
        self.register_buffer("scale", torch.tensor(1.0))

    def forward(self, outputs, targets):
        found = nn.functional.cross_entropy(outputs, targets)
        if self.moves and found.requires_grad:
            self.scale.mul_(0.9).add_(found.detach(), alpha=0.1)
        return found / self.scale.clone()

class Noisy(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                weight.add_(torch.randn_like(weight), alpha=0.01)

class Squares(torchmetrics.Metric):
    def __init__(self):
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, outputs, targets):
        self.total += outputs.square().sum()
        self.count += outputs.numel()

    def compute(self):
        return self.total / self.count

recipe = Recipe(model=lambda options: Odd(options.kind), data=data, loss=Scaled(False),
    options=Options, metrics={"squares": Squares()},
    settings={"epochs": 2, "batch_size": 16, "lr": 0.01, "log_every": 1,
              "virtual_ranks": 4, "find_unused": True})
"""
CHANGES = {
    "a metric of floating-point sums": ("", ""),
    "a buffer that each forward writes, in evaluations too": (
        'kind: str = ""',
        'kind: str = "counts"',
    ),
    "noise in the update": (
        "loss=Scaled(False)",
        "loss=Scaled(False), optimizer=lambda model, s: Noisy(model.parameters(), lr=s.lr)",
    ),
}


@pytest.fixture
def recipe(tmp_path):
    return tiny.write_recipe(tmp_path, RECIPE, "odd.py")


def test_odd_models_have_the_same_bits_on_one_rank_and_on_three(tmp_path):
    words = []
    for number, (name, change) in enumerate(CHANGES.items()):
        recipe = tiny.write_recipe(tmp_path, RECIPE.replace(*change), f"odd{number}.py")
        tiny.trained(recipe, tmp_path / name)
        words.append([recipe, "--run-dir", tmp_path / f"{name} on 3"])
    tiny.train_all(words, on=3, folder=tmp_path)
    for name in CHANGES:
        tiny.assert_same_training(tmp_path / f"{name} on 3", tmp_path / name, tolerance=0)


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("renormed", "the model's parameter words.weight"),
        ("teacher", "the model's parameter teacher.weight"),
        ("most", "the model's buffer most is infinite"),
        ("synchronised", "the model's norm is a SyncBatchNorm"),
    ],
)
def test_a_model_whose_forward_cannot_keep_the_promise_is_refused(
    here, refused, recipe, kind, named
):
    assert named in refused("train", str(recipe), "--kind", kind, "--run-dir", "run")


def test_a_loss_that_moves_a_buffer_of_its_own_is_refused(here, refused, recipe):
    recipe.write_text(RECIPE.replace("Scaled(False)", "Scaled(True)"))
    assert "the loss's buffer scale" in refused("train", str(recipe), "--run-dir", "run")


def test_what_an_unused_parameter_gets_cannot_change_when_a_run_goes_on(here, refused, recipe):
    recipe.write_text(RECIPE.replace(', "find_unused": True', ""))
    tiny.trained(recipe, here / "run")
    told = refused("train", "run", "--resume", "--epochs", "3", "--find-unused")
    assert "--find-unused" in told
