"""A recipe of models that write where they should not; changed, with virtual ranks it may."""

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
        if self.kind == "most": self.most = torch.maximum(self.most, out.detach().max())
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
        if self.moves and found.requires_grad: self.scale.mul_(0.9).add_(found.detach(), alpha=0.1)
        return found / self.scale.clone()
class Noisy(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for weight in group["params"]: weight.add_(torch.randn_like(weight), alpha=0.01)
class Squares(torchmetrics.Metric):
    def __init__(self):
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")
    def update(self, outputs, targets):
        self.total += outputs.square().sum()
        self.count += outputs.numel()
    def compute(self): return self.total / self.count
recipe = Recipe(model=lambda options: Odd(options.kind), data=data, loss=Scaled(False),
    options=Options, metrics={"squares": Squares()},
    settings={"epochs": 2, "batch_size": 16, "lr": 0.01, "log_every": 1,
              "virtual_ranks": 4, "find_unused": True})
"""
CHANGED = {
    "a metric of floating-point sums": RECIPE,
    "a buffer that each forward writes": RECIPE.replace('kind: str = ""', 'kind: str = "counts"'),
    "noise in the update": RECIPE.replace(
        "loss=Scaled(False)",
        "loss=Scaled(False), optimizer=lambda model, s: Noisy(model.parameters(), lr=s.lr)",
    ),
}
