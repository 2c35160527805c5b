"""Trainings with one planted bottleneck each, and what a profile of them has to say."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RECIPE = """
import os
import time
import torch
from torch import nn
from samestep import Recipe, Splits
RANK = int(os.environ.get("RANK", "0"))
WIDTH, SAMPLES, BATCH, HIDDEN = {sizes}
class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        time.sleep({backward})  # planted: a slow rank
        return gradient
class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES
    def __getitem__(self, index):
        time.sleep({sample})  # planted: a slow disk
        return torch.full((WIDTH,), float(index % 7)), index % 2
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = {layers}
    def forward(self, x):
        if not self.training:
            time.sleep({evaluation})  # planted: a long evaluation
        return Slow.apply(self.layers(x))
    def state_dict(self, *args, **kwargs):
        time.sleep({checkpoint})  # planted: a long write
        return super().state_dict(*args, **kwargs)
def data():
    x, y = torch.randn(SAMPLES, WIDTH), torch.arange(SAMPLES) % 2
    validation = {validation}
    return Splits(train={train}, validation=validation)
recipe = Recipe(model=Net, data=data, settings={{
    "epochs": 2, "batch_size_per_rank": BATCH, "optimizer": "sgd", "lr": 1e-6, {settings}
}})
"""
_DEFAULTS = dict.fromkeys(("backward", "sample", "evaluation", "checkpoint"), "0")
_DEFAULTS |= {"sizes": "16, 640, 32, 16", "validation": "None", "train": "(x, y)"}
_DEFAULTS |= {
    "layers": "nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 2))",
    "settings": '"checkpoint_every_epochs": 1000',
}

SCRIPT = """
import os
import time
import torch
from torch import nn
class Samples(torch.utils.data.Dataset):
    def __init__(self, size):
        self.rows = [(row, n % 2) for n, row in enumerate(torch.randn(size, {width}).unbind())]
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, index):
        return self.rows[index]
class SlowToSave:
    def __reduce__(self):
        time.sleep({save})  # planted: a long write
        return int, ()
def main():
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    layers = [nn.Sequential(nn.Linear({width}, {width}), nn.ReLU()) for _ in range({depth})]
    model = nn.Sequential(*layers, nn.Linear({width}, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(Samples({samples}), batch_size={batch}{loader})
    for epoch in range(10_000):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            {after_backward}
            optimizer.step()
            {after_step}
if __name__ == "__main__":
    main()
"""
_SCRIPT_DEFAULTS = {"save": "0", "depth": "1", "width": "64", "samples": "640", "batch": "32"}
_SCRIPT_DEFAULTS |= {"loader": "", "after_backward": "pass", "after_step": "pass"}


@dataclass(frozen=True)
class Situation:
    name: str
    verdict: str
    says: str
    """Words that the evidence or the advice must have."""
    recipe: dict[str, str] = field(default_factory=dict)
    script: dict[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    nproc: int = 1
    slow: bool = False
    """Whether only `make test-all` runs it: a quicker test covers most of it."""

    def write(self, folder: Path) -> Path:
        path = folder / "planted.py"
        if self.script:
            path.write_text(SCRIPT.format(**{**_SCRIPT_DEFAULTS, **self.script}))
        else:
            path.write_text(RECIPE.format(**{**_DEFAULTS, **self.recipe}))
        return path

    def command(self, folder: Path, seconds: float) -> list[str]:
        place = ("--out" if self.script else "--run-dir", str(folder / "profile"))
        target = str(self.write(folder))
        return ["profile", target, "--seconds", str(seconds), *self.flags, *place]


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "profile" / "profile.json").read_text())
    return found


_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
_LAYER = "nn.Linear(16, 16)"
_FROM_DISK = {"train": "Samples()", "sample": "0.001"}

_DEEP = f"nn.Sequential(*[{_LAYER}] * 8, nn.Linear(16, 2))"
_CHAIN = "nn.Sequential(*[nn.Hardtanh() for _ in range(12)], nn.Linear(WIDTH, 2))"
_EVERY_2 = '"eval_every_steps": 2, "checkpoint_every_epochs": 1000'
_PRODUCTS = {"sizes": "1024, 1024, 512, 1024"}
_CHAINS = {"sizes": "4096, 2048, 1024, 16", "layers": _CHAIN}
_SLOW_RANK = {"backward": "0.05 if RANK == 1 else 0"}
_SLOW_DATA = {"train": "Samples()", "sample": "0.003 if RANK == 1 else 0"}
_LARGE = {"sizes": "512, 2048, 512, 512"}
_SLOW_SAVING = {"checkpoint": "0.05", "settings": '"checkpoint_every_steps": 4'}
_EVALUATING = {"evaluation": "0.02", "validation": "(x, y)", "settings": _EVERY_2}
# Of scripts.
_NUMBERS = "[(float(r.max()), float(r.sum()), int(r.argmax())) for r in model(x)]"
_READING = {"after_backward": _NUMBERS, "batch": "64"}
_WORKERS = {"samples": "64", "loader": ", num_workers=1"}
_SAVING = {"save": "0.02", "after_step": "torch.save({'s': SlowToSave()}, os.devnull)"}
_LOGGING = {"after_step": "time.sleep(0.03)  # drawing, writing, printing"}
_ONE, _MANY = ("--threads", "1"), ("--threads", str(4 * _CORES))

INPUT, SAVES = "input-bound", "checkpoint-bound"
SITUATIONS = [
    Situation("a data set that sleeps", INPUT, "itself", _FROM_DISK, slow=True),
    Situation("a tiny model", "launch-bound", "--compile on", {"layers": _DEEP}),
    Situation("matrix products", "compute-bound", "mm", _PRODUCTS, flags=_ONE),
    Situation("long chains of element by element", "memory-bound", "fuse", _CHAINS, slow=True),
    Situation("a rank that computes slowly", "straggler", "rank 1", _SLOW_RANK, nproc=2),
    Situation(
        "a rank whose data is slow", "straggler", "for its data", _SLOW_DATA, nproc=2, slow=True
    ),
    Situation("a tiny model on two ranks", "communication-bound", "latency", {}, nproc=2),
    Situation("numbers read of every sample", "host-sync", "Sum them", script=_READING),
    Situation("more threads than cores", "oversubscribed", "--threads", _LARGE, flags=_MANY),
    Situation("slow checkpoints", SAVES, "less often", _SLOW_SAVING, slow=True),
    Situation("evaluations too often", "evaluation-bound", "less often", _EVALUATING, slow=True),
    Situation("workers that start in every epoch", INPUT, "persistent_workers", script=_WORKERS),
    Situation("slow saving in a script", SAVES, "less often", script=_SAVING, slow=True),
    Situation("much logging in a script", "loop-bound", "less often", script=_LOGGING, slow=True),
]
