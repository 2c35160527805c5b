"""Trainings with one planted bottleneck each, and what a profile of them has to say.

What is planted is a cause, often a sleep: that stands for a slow disk, a slow node, a long write.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
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
_DEFAULTS = {
    "sizes": "16, 640, 32, 16",
    "backward": "0",
    "sample": "0",
    "evaluation": "0",
    "checkpoint": "0",
    "layers": "nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 2))",
    "validation": "None",
    "train": "(x, y)",
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
_SCRIPT_DEFAULTS = {
    "save": "0",
    "depth": "1",
    "width": "64",
    "samples": "640",
    "batch": "32",
    "loader": "",
    "after_backward": "pass",
    "after_step": "pass",
}


@dataclass(frozen=True)
class Situation:
    """A planted bottleneck."""

    name: str
    verdict: str
    says: str = ""
    """Words that the evidence or the advice must have."""
    recipe: tuple[tuple[str, str], ...] = ()
    script: tuple[tuple[str, str], ...] = ()
    flags: tuple[str, ...] = ()
    nproc: int = 1
    slow: bool = False
    """Whether it is left to `make test-all`: a quicker test holds most of what it would show."""

    def write(self, folder: Path) -> Path:
        """Write its file and return its path."""
        path = folder / "planted.py"
        if self.script:
            path.write_text(SCRIPT.format(**{**_SCRIPT_DEFAULTS, **dict(self.script)}))
        else:
            path.write_text(RECIPE.format(**{**_DEFAULTS, **dict(self.recipe)}))
        return path

    def command(self, folder: Path, seconds: float) -> list[str]:
        """Return the arguments of `samestep` that profile it into a folder."""
        place = "--out" if self.script else "--run-dir"
        return [
            "profile",
            str(self.write(folder)),
            "--seconds",
            str(seconds),
            *self.flags,
            place,
            str(folder / "profile"),
        ]


def read(folder: Path) -> dict[str, Any]:
    """Return what a profile of a situation found."""
    found: dict[str, Any] = json.loads((folder / "profile" / "profile.json").read_text())
    return found


_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
_LAYER = "nn.Linear(16, 16)"
_FROM_DISK = (("train", "Samples()"), ("sample", "0.001"))

SITUATIONS = [
    Situation("a data set that sleeps", "input-bound", "itself", recipe=_FROM_DISK, slow=True),
    Situation(
        "a data set that sleeps, with a worker",
        "input-bound",
        "1 worker",
        recipe=_FROM_DISK,
        flags=("--num-workers", "1"),
        slow=True,
    ),
    Situation(
        "a tiny model",
        "launch-bound",
        "--compile on",
        recipe=(("layers", f"nn.Sequential(*[{_LAYER}] * 8, nn.Linear(16, 2))"),),
    ),
    Situation(
        "matrix products",
        "compute-bound",
        "mm",
        flags=("--threads", "1"),
        recipe=(("sizes", "1024, 1024, 512, 1024"),),
    ),
    Situation(
        "long chains of element by element",
        "memory-bound",
        "fuse",
        recipe=(
            ("sizes", "4096, 2048, 1024, 16"),
            ("layers", "nn.Sequential(*[nn.Hardtanh() for _ in range(12)], nn.Linear(WIDTH, 2))"),
        ),
    ),
    Situation(
        "a rank that computes slowly",
        "straggler",
        "rank 1",
        nproc=2,
        recipe=(("backward", "0.05 if RANK == 1 else 0"),),
    ),
    Situation(
        "a rank whose data is slow",
        "straggler",
        "for its data",
        nproc=2,
        recipe=(("train", "Samples()"), ("sample", "0.003 if RANK == 1 else 0")),
        slow=True,
    ),
    Situation("a tiny model on two ranks", "communication-bound", "latency", nproc=2),
    Situation(
        "numbers read of every sample",
        "host-sync",
        "Add numbers up",
        script=(
            (
                "after_backward",
                "[(float(r.max()), float(r.sum()), int(r.argmax())) for r in model(x)]",
            ),
            ("batch", "64"),
        ),
    ),
    Situation(
        "more threads than cores",
        "oversubscribed",
        "--threads",
        flags=("--threads", str(4 * _CORES)),
        recipe=(("sizes", "512, 2048, 512, 512"),),
    ),
    Situation(
        "slow checkpoints",
        "checkpoint-bound",
        "more rarely",
        recipe=(("checkpoint", "0.05"), ("settings", '"checkpoint_every_steps": 4')),
    ),
    Situation(
        "evaluations too often",
        "evaluation-bound",
        "more rarely",
        recipe=(
            ("evaluation", "0.02"),
            ("validation", "(x, y)"),
            ("settings", '"eval_every_steps": 2, "checkpoint_every_epochs": 1000'),
        ),
    ),
    Situation(
        "workers that start in every epoch",
        "input-bound",
        "persistent_workers",
        script=(("samples", "64"), ("loader", ", num_workers=1")),
    ),
    Situation(
        "large batches put together in the training process",
        "input-bound",
        "collates samples",
        script=(("samples", "8192"), ("batch", "4096"), ("width", "16"), ("depth", "0")),
        slow=True,
    ),
    Situation(
        "slow saving in a script",
        "checkpoint-bound",
        "more rarely",
        script=(("save", "0.02"), ("after_step", "torch.save({'s': SlowToSave()}, os.devnull)")),
        slow=True,
    ),
    Situation(
        "much logging in a script",
        "loop-bound",
        "once in many",
        script=(("after_step", "time.sleep(0.03)  # drawing, writing, printing"),),
    ),
]


def main() -> None:
    """Profile the situations named, or all, in turn; print what is said of each."""
    import tempfile

    wanted = sys.argv[1:]
    for one in SITUATIONS:
        if wanted and not any(word in one.name for word in wanted):
            continue
        with tempfile.TemporaryDirectory() as name:
            began = time.perf_counter()
            command = [sys.executable, "-m", "samestep", *one.command(Path(name), 1.0)]
            if one.nproc > 1:
                command += ["--nproc", str(one.nproc)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            took = time.perf_counter() - began
            kind = read(Path(name))["verdict"]["kind"] if done.returncode == 0 else "failed"
            print("ok " if kind == one.verdict else "BAD", f"{took:.1f} s", one.name, kind)
            if kind != one.verdict or "-v" in wanted:
                print(done.stdout, done.stderr)


if __name__ == "__main__":
    main()
