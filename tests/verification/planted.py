"""A recipe that trains the same on any ranks, and what may be planted in it."""

import textwrap
from pathlib import Path

PARTS = ("model", "loss", "augment", "transform", "schedule", "settings")
GOOD = """
from dataclasses import replace
import torch
from torch import nn
from samestep import Recipe, Splits, uniform
def data():
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(90, 6, generator=generator)
    y = (x[:, 0] > 0).long()
    return Splits(train=(x[:60], y[:60]), validation=(x[60:], y[60:]))
def model(): return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
recipe = Recipe(model=model, data=data, settings={"epochs": 2, "batch_size": 10})
"""


def write(folder: Path, planted: str = "", name: str = "planted.py") -> Path:
    """Write the good recipe, with lines after it that plant something: what they define, it has."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    defined = [p for p in PARTS if f"\ndef {p}(" in planted or f"\n{p} = " in planted]
    parts = ", ".join(("recipe", *(f"{part}={part}" for part in defined)))
    path.write_text(f"{GOOD}{planted}recipe = replace({parts})\n")
    return path


def line_of(path: Path, text: str) -> str:
    """Return where some text stands in a recipe, as it is told: `planted.py:31`."""
    lines = path.read_text().splitlines()
    return f"{path.name}:{next(k for k, line in enumerate(lines, start=1) if text in line)}"


def _module(built: str, forward: str, *, before: str = "", name: str = "Planted") -> str:
    """Return lines that plant a model with these attributes and this forward."""
    body = [
        *(before, f"class {name}(nn.Module):", "    def __init__(self):"),
        textwrap.indent("super().__init__()\n" + built.strip(), " " * 8),
        *("    def forward(self, x):", textwrap.indent(forward.strip(), " " * 8)),
    ]
    return "\n".join((*body, f"recipe = replace(recipe, model={name})\n"))


def _between(layers: str, *, first: str = "nn.Linear(6, 8)") -> str:
    """Return lines that plant a model with these layers between its two linear ones."""
    return f"\ndef model():\n    return nn.Sequential({first}, {layers}, nn.Linear(8, 2))\n"


BATCHNORM = _between("nn.BatchNorm1d(8), nn.Tanh()")
DROPOUT = _between("nn.Tanh(), nn.Dropout(0.5)")
BOTH = _between("nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5)")
SPECTRAL = _between("nn.Tanh()", first="nn.utils.spectral_norm(nn.Linear(6, 8))")
FUNCTIONAL = _module(
    "self.line = nn.Linear(6, 2)", "return nn.functional.dropout(self.line(x), 0.3, self.training)"
)
AUGMENT = """
def augment(x, keys): return x + torch.rand_like(x)
"""
AUGMENT_WHOLE_BATCH = """
def augment(x, keys): return -x if uniform(keys[:1], 1) < 0.5 else x
"""
TRANSFORM = """
def transform(x): return x * (0.5 + torch.rand(1))
"""
DATASET = """
import random
generator = random.Random()
class Noisy(torch.utils.data.Dataset):
    def __init__(self, pair): self.x, self.y = pair
    def __len__(self): return len(self.x)
    def __getitem__(self, index): return self.x[index] + generator.random(), self.y[index]
def noisy():
    splits = data()
    return Splits(train=Noisy(splits.train), validation=splits.validation)
recipe = replace(recipe, data=noisy)
"""
LOSS_SUM = """
def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="sum") / 10
"""
LOSS_SUM_SAID = f"""{LOSS_SUM}
recipe = replace(recipe, reduction="sum", loss=loss)
"""
MEAN_SAID_TO_BE_A_SUM = """
recipe = replace(recipe, reduction="sum")
"""
LOSS_WEIGHTED = """
def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, torch.tensor([1.0, 5.0]).to(outputs))
"""
LOSS_OF_TERMS = f"""{LOSS_WEIGHTED}
weights = torch.tensor([1.0, 5.0])
recipe = replace(recipe, loss_terms=lambda batch: weights[batch[1]].sum())
"""
OTHER_TERMS = f"""{LOSS_WEIGHTED}
recipe = replace(recipe, loss_terms=lambda batch: batch[1].sum() + 1)
"""
METRIC_OVER_RANKS = """
import torch.distributed as dist
def accuracy(outputs, targets):
    mean = (outputs.argmax(1) == targets).double().mean()
    if dist.is_initialized():
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return mean.expand(len(targets))
recipe = replace(recipe, metrics={"accuracy": accuracy})
"""
ORDER = """
import os
def shuffled():
    splits = data()
    seed = int.from_bytes(os.urandom(4), "big")
    order = torch.randperm(60, generator=torch.Generator().manual_seed(seed))
    x, y = splits.train
    return Splits(train=(x[order], y[order]), validation=splits.validation)
recipe = replace(recipe, data=shuffled)
"""
UNUSED = _module(
    """self.line = nn.Linear(6, 2)
self.spare = nn.Linear(6, 2)""",
    "return self.line(x)",
)
BRANCH = _module(
    "self.line, self.rare = nn.Linear(6, 2), nn.Linear(6, 2)",
    """rare, out = x[:, 1] > 1, self.line(x)
return out + self.rare(x) * rare[:, None] if rare.any() else out""",
)
UNUSED_AT_TIMES = _module(
    """self.line, self.spare = nn.Linear(6, 2), nn.Linear(6, 2)
self.register_buffer("calls", torch.zeros(()))""",
    """if self.training:
    self.calls += 1
return self.line(x) + (self.spare(x) if self.calls < 3 else 0)""",
)
PYTHONS_RANDOM = _module(
    "self.line, self.more = nn.Linear(6, 2), nn.Linear(6, 2)",
    "return self.line(x) + self.more(x) * random.random()",
    before="import random",
)
COUNTER = _module(
    "self.line, self.calls = nn.Linear(6, 2), 0",
    """self.calls += 1
return self.line(x) / self.calls""",
    name="Counts",
)
OWN_GENERATOR = _module(
    "self.line = nn.Linear(6, 2)",
    "return self.line(x + torch.randn(x.shape, generator=g, dtype=x.dtype) * self.training)",
    before="g = torch.Generator().manual_seed(1)",
)
FIXED_SHAPE = _module(
    "self.line = nn.Linear(6, 2)",
    "return self.line(x.reshape(-1, 4, 6) if self.training else x).reshape(-1, 2)",
)
LAST_BENT = """
def loss(outputs, targets):
    value = nn.functional.cross_entropy(outputs, targets)
    return value if len(targets) > 3 else value * len(targets) / 4
"""
PRINTS = """
def loud():
    print("reading data")
    return data()
recipe = replace(recipe, data=loud)
"""
WRITES = """
from pathlib import Path
def noted():
    Path(__file__).with_name("table_v1.txt").write_text("read")
    return data()
recipe = replace(recipe, data=noted)
"""
WRITES_OF_ITS_OWN = """
import os, tempfile
os.makedirs("cache", exist_ok=True)
def private():
    with tempfile.NamedTemporaryFile() as file: file.write(b"x")
    with open(f"cache/rank-{os.environ.get('RANK', '0')}.txt", "w") as file: file.write("x")
    return data()
recipe = replace(recipe, data=private)
"""
OWN_FORWARD = _module("self.line = nn.Linear(6, 2)", "return self.line(x)")
F1 = """
def f1(outputs, targets):
    predicted = outputs.argmax(1)
    hits = ((predicted == 1) & (targets == 1)).sum()
    wrong = (predicted != targets).sum()
    return (2.0 * hits / (2.0 * hits + wrong).clamp(min=1)).expand(len(targets))
def model():
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    nn.init.constant_(net[2].bias[0], 100.0)  # all samples begin in one class
    return net
recipe = replace(recipe, model=model, metrics={"f1": f1})
"""
OBJECTS = """
from torchmetrics.classification import BinaryAUROC
class OfTwo(BinaryAUROC):
    def update(self, outputs, targets): super().update(outputs[:, 1] - outputs[:, 0], targets)
class Looks(OfTwo):
    def update(self, outputs, targets):
        super().update(outputs.softmax(1) if outputs.min() < 0 else outputs, targets)
recipe = replace(recipe, metrics={"auroc": OfTwo(), "looks": Looks()})
"""
WHITENING = _module(
    "self.inner, self.out = nn.Linear(6, 8), nn.Linear(8, 2)",
    """h = self.inner(x)
return self.out((h - h.mean(0)) / (h.std(0) + 1))""",
    name="Whitened",
)
EMA = _module(
    """self.inner, self.out = nn.Linear(6, 8), nn.Linear(8, 2)
self.register_buffer("mean", torch.zeros(8))""",
    """h = self.inner(x)
y = self.out(h - self.mean)
if self.training: self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
return y""",
)
STATE_IN_LOSS = """
class WarmedUp:
    calls = 0
    def __call__(self, outputs, targets):
        self.calls += 1
        return nn.functional.cross_entropy(outputs, targets) * min(1.0, self.calls / 1000)
recipe = replace(recipe, loss=WarmedUp())
"""
OTHER_WEIGHTS = """
import os
def model():
    torch.manual_seed(int.from_bytes(os.urandom(4), "big"))
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
"""
RANK_IN_FORWARD = _module(
    "self.line = nn.Linear(6, 2)",
    'return self.line(x) * (1 + 0.1 * int(os.environ.get("RANK", "0")))',
    before="import os",
)
SPARSE = """
class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.EmbeddingBag(9, 4, sparse=True), nn.Linear(4, 2)
    def forward(self, x): return self.out(self.words((x.abs() * 3).long().clamp(max=8)))
def optimizer(model, settings): return torch.optim.SGD(model.parameters(), lr=0.1)
recipe = replace(recipe, model=Words, optimizer=optimizer)
"""
CONTRAST = """
class TwoViews(nn.Module):
    def __init__(self):
        super().__init__()
        self.line, self.scale = nn.Linear(6, 4), nn.Parameter(torch.tensor(10.0))
    def forward(self, x): return torch.stack([self.line(x), self.line(0.9 * x)], dim=1), self.scale
def loss(outputs, targets):
    views, scale = outputs  # the scale is one number for the whole batch
    one, other = nn.functional.normalize(views, dim=2).unbind(1)
    return nn.functional.cross_entropy(scale * one @ other.T, torch.arange(len(one)))
recipe = replace(recipe, model=TwoViews, loss=loss, metrics={})
"""
LAZY = """
recipe = replace(recipe, model=lambda: nn.LazyLinear(2))
"""
FLOATS = """
def loss(outputs, targets):
    one_hot = nn.functional.one_hot(targets, 2).float() * torch.tensor([1.0, 0.5])
    return nn.functional.mse_loss(outputs.float(), one_hot)
"""
SINGLE = """
class Single(nn.Linear):
    def forward(self, x):
        if x.dtype == torch.float64: raise TypeError("a kernel of float32 alone")
        return super().forward(x) * (1 + 1e-3 * torch.rand(len(x), 1))
recipe = replace(recipe, model=lambda: Single(6, 2))
"""
HIDDEN_STATE = _module(
    "self.rnn, self.out, self.hidden = nn.GRU(2, 4, batch_first=True), nn.Linear(4, 2), None",
    """kept = self.hidden if self.hidden is not None and self.hidden.shape[1] == len(x) else None
y, hidden = self.rnn(x.reshape(-1, 3, 2), kept)
self.hidden = hidden.detach()
return self.out(y).flatten(0, 1)""",
)
CARRIED = f"""{HIDDEN_STATE}
def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets.repeat_interleave(3))
recipe = replace(recipe, metrics={{}})
"""
CACHED = _module(
    "self.line = nn.Linear(6, 2)",
    """if not hasattr(self, "scale"):
    self.register_buffer("scale", torch.ones(6))
return self.line(x * self.scale)""",
)
NUMPY_GENERATOR = _module(
    "self.line, self.rng = nn.Linear(6, 2), numpy.random.default_rng(3)",
    "return self.line(x) + float(self.rng.normal())",
    before="import numpy",
)
BANK = _module(
    "self.line, self.bank = nn.Linear(6, 2), []",
    """y = self.line(x)
self.bank.append(y.detach().mean(0))
return y - torch.stack(self.bank[-4:]).mean(0)""",
)
OWN_OPTIMIZER = """
class Own(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.moved = {}
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            mean = self.moved.setdefault(p, torch.zeros_like(p))
            p.sub_(mean.mul_(0.9).add_(p.grad), alpha=0.1)
recipe = replace(recipe, optimizer=lambda model, settings: Own(model.parameters()))
"""
DRAWING_OPTIMIZER = OWN_OPTIMIZER.replace(
    "mean = self.moved.setdefault(p, torch.zeros_like(p))", "mean = torch.randn_like(p)"
)
LEARNED_OUTSIDE = """
class Scaled:
    def __init__(self): self.scale = nn.Parameter(torch.ones(()))
    def __call__(self, outputs, targets):
        if self.scale.grad is not None:
            with torch.no_grad(): self.scale -= 0.5 * self.scale.grad
            self.scale.grad = None
        return nn.functional.cross_entropy(outputs * self.scale, targets)
recipe = replace(recipe, loss=Scaled())
"""
CLOCK = """
from time import perf_counter
def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets) * (1 + perf_counter() % 1)
"""
WORLD_SIZE = """
import os
def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets) * int(os.environ.get("WORLD_SIZE", "1"))
"""

COLLATE_DRAWS = """
def pairs():
    splits = data()
    train, validation = ([*zip(*split)] for split in (splits.train, splits.validation))
    return Splits(train=train, validation=validation)
def collate(rows):
    x, y = map(torch.stack, zip(*rows))
    return x * (torch.rand(x.shape) > 0.5), y
recipe = replace(recipe, data=pairs, collate=collate)
"""
COLLATE_BY_SAMPLE = COLLATE_DRAWS.replace(
    "x * (torch.rand(x.shape) > 0.5)",
    "torch.stack([a * torch.rand(6, generator=torch.Generator().manual_seed(int(b))) "
    "for a, b in rows])",
)
PADDED = f"""{COLLATE_DRAWS.replace("x * (torch.rand(x.shape) > 0.5)", "pad(x)")}
def pad(x): return nn.functional.pad(x, (0, int(9 * x[:, 0].max().clamp(0))))
class Mean(nn.Linear):
    def forward(self, x): return super().forward(x[:, :6] / x.shape[1])
recipe = replace(recipe, model=lambda: Mean(6, 2))
"""
LOSS_IN_FORWARD = f"""{COLLATE_BY_SAMPLE}{LOSS_WEIGHTED.replace("def loss", "def weighted")}
def forward(model, batch): return {{"loss": weighted(model(batch[0]), batch[1])}}
recipe = replace(recipe, metrics={{}}, forward=forward, loss=lambda outputs, _: outputs["loss"])
"""
DRAWN_IN_FORWARD = LOSS_IN_FORWARD.replace("model(batch[0])", "model(batch[0] * torch.rand(6))")
PACKED = f"""{COLLATE_DRAWS}
def packed(rows):
    x, y = zip(*rows)
    return {{"x": torch.cat(x)[None, :, None], "y": torch.stack(y)}}
def loss(outputs, batch):
    return nn.functional.cross_entropy(outputs.view(-1, 6, 2).mean(1), batch["y"])
class Causal(nn.Linear):
    def forward(self, x):
        return super().forward(x + x.cumsum(1) / 10)
recipe = replace(
    recipe, model=lambda: Causal(1, 2), collate=packed, metrics={{}},
    forward=lambda model, batch: model(batch["x"]),
)
"""
ACT_NORM = _module(
    """self.line, self.scale = nn.Linear(6, 2), nn.Parameter(torch.ones(2))
self.register_buffer("ready", torch.tensor(False))""",
    """y = self.line(x)
if not self.ready:
    self.scale.data.copy_(1 / y.detach().std(0))
    self.ready.fill_(True)
return y * self.scale""",
)
EXTRA_STATE = """
class Counted(nn.Linear):
    steps = 0
    def get_extra_state(self): return {"steps": self.steps, "scales": None}
    def set_extra_state(self, state): self.steps = state["steps"]
    def forward(self, x):
        self.steps += 1
        return super().forward(x) * (1 + 0.1 * self.steps)
recipe = replace(recipe, model=lambda: Counted(6, 2))
"""
ROUNDING_OPTIMIZER = """
class Rounding(torch.optim.Optimizer):
    def __init__(self, parameters): super().__init__(parameters, {"lr": 0.1})
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            g = p.grad.bfloat16() if p.dim() == 2 else p.grad
            p.sub_(g @ g.T @ g if p.dim() == 2 else g)
recipe = replace(recipe, optimizer=lambda model, settings: Rounding(model.parameters()))
"""
QUANTISED_OPTIMIZER = ROUNDING_OPTIMIZER.replace(
    "p.grad.bfloat16() if p.dim() == 2 else p.grad",
    "(p.grad * 64).round().clamp(-128, 127).view(-1).to(torch.int8).view_as(p).to(p) / 64",
)
JOINT_OPTIMIZER = """
class Joint(torch.optim.Optimizer):
    def __init__(self, model):
        self.parts = [torch.optim.AdamW([p], lr=0.01) for p in model.parameters()]
        super().__init__([g for one in self.parts for g in one.param_groups], {})
        self.param_groups = [g for one in self.parts for g in one.param_groups]
    def step(self, closure=None):
        for one in self.parts: one.step()
    def state_dict(self):
        return {"state": {}, "param_groups": [], "parts": [one.state_dict() for one in self.parts]}
    def load_state_dict(self, saved):
        for one, state in zip(self.parts, saved["parts"]): one.load_state_dict(state)
recipe = replace(recipe, optimizer=lambda model, settings: Joint(model))
"""
BY_FORWARD = f"""{BATCHNORM}{ROUNDING_OPTIMIZER}
def loss(outputs, batch):
    return nn.functional.cross_entropy(outputs, batch[1])
recipe = replace(
    recipe, forward=lambda model, batch: model(batch[0]), metrics={{}}, accepts=("batchnorm",)
)
"""

FOLLOWS_VALIDATION = """
settings = {**recipe.settings, "monitor": "loss"}
def schedule(optimizer, plan):
    # Each validation halves the rate, since none is so much better.
    kind = torch.optim.lr_scheduler.ReduceLROnPlateau
    return kind(optimizer, patience=0, factor=0.5, threshold=1)
"""
