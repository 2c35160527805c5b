"""Measure your own loop beside a hand-written one with DDP: two Gloo ranks, by turns.

    python benchmarks/own_loop.py [--before COMMIT] [--turns 8]

Both loops train the same model in the same two processes and take one step after the other; with
`--before`, every other turn has the `run.backward` of that commit. The native loop slices its
batches from tensors, which is faster than a DataLoader. Writes `benchmarks/results/own-loop.md`.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from report import machine
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import samestep
from samestep.core.loops import run as loop_run

HERE = Path(__file__).parent
BATCH, STEPS = 64, 12
Data = tuple[Tensor, Tensor]
Turns = dict[str, list[tuple[float, float, float]]]
"""By version of `run.backward`: native milliseconds, and the ratios of wall and CPU time."""


def mlp(width: int) -> nn.Module:
    """Build a perceptron of four layers."""
    sizes = itertools.pairwise((256, width, width, width))
    layers = [part for a, b in sizes for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def convnet() -> nn.Module:
    """Build the network of PyTorch's MNIST example for images of 16 by 16, 0.3 million weights."""
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 16, 16)), nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3)),
        *(nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2304, 128), nn.ReLU()),
        nn.Linear(128, 10),
    )


MODELS = {
    "convnet, 0.3 million weights": convnet,
    "MLP, 1.0 million weights": lambda: mlp(640),
    "MLP, 10.1 million weights": lambda: mlp(2176),
}


def native(model: nn.Module, data: Data, rank: int, size: int) -> Iterator[None]:
    """Train as one writes it by hand, without end; each step is one `next`."""
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters())
    x, y = data
    while True:
        mine = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[rank::size]
        total = torch.zeros(())
        for rows in mine.split(BATCH):
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
            yield


def old_backward(commit: str) -> Callable[..., Tensor]:
    """Return `backward` as it was at a commit."""
    path = f"{commit}:src/samestep/session/gradients.py"
    source = subprocess.run(
        ["git", "show", path], cwd=HERE, check=True, capture_output=True, text=True
    )
    module = types.ModuleType("before")
    exec(source.stdout, vars(module))

    def backward(*given: object, kept: object, **how: object) -> Tensor:  # noqa: ARG001
        return module.backward(*given, **how)  # it kept no buffers

    return backward


def clocks() -> tuple[float, float]:
    """Return the wall time and the CPU time of this process, in seconds."""
    return time.perf_counter(), time.process_time()


def turns_of(build: Callable[[], nn.Module], asked: argparse.Namespace) -> Turns:
    """Return the native milliseconds and the ratios of own to native seconds of each turn."""
    versions = {"now": loop_run.backward}
    if asked.before:
        versions = {"before": old_backward(asked.before), **versions}
    found: Turns = {name: [] for name in versions}
    # Like a long run: few records, and no checkpoint meanwhile.
    how = {"device": "cpu", "log_every": 50, "checkpoint_every_epochs": 999}
    with samestep.open_run(asked.run_dir, **how) as run:
        number = BATCH * run.world_size
        data = torch.randn(number * STEPS, 256), torch.randint(10, (number * STEPS,))
        model = build()
        optimizer = torch.optim.Adam(model.parameters())
        other = native(build(), data, run.rank, run.world_size)
        for epoch in run.epochs(
            asked.turns * len(versions) + len(versions),
            state={"model": model, "optimizer": optimizer},
        ):
            name = [*versions][epoch % len(versions)]
            loop_run.backward = versions[name]
            taken: list[tuple[float, ...]] = []
            start = clocks()
            for batch in run.batches(data, number):
                inputs, targets = batch.data
                loss = nn.functional.cross_entropy(model(inputs), targets)
                optimizer.zero_grad()
                run.backward(loss, model)
                optimizer.step()
                run.log(loss=loss)
                middle = clocks()
                next(other)
                end = clocks()
                taken.append(
                    [b - a for a, b in zip((*start, *middle), (*middle, *end), strict=True)]
                )
                start = clocks()
            own, own_cpu, by_hand, cpu = (
                statistics.median(t) for t in zip(*taken[1:], strict=True)
            )
            if epoch >= len(versions):  # the first turn of each warms up
                found[name].append((by_hand * 1e3, own / by_hand, own_cpu / cpu))
        del other
    return found


def main() -> None:
    """Measure each model in two ranks of its own, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", help="a commit")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--run-dir", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.model:
        torch.set_num_threads(1)
        found = turns_of(MODELS[asked.model], asked)
        if os.environ["RANK"] == "0":
            print(json.dumps(found))
        return
    facts, rows = machine(), []
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            more = ("--model", name, "--run-dir", folder)
            command = [sys.executable, *launcher, __file__, *sys.argv[1:], *more]
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
        for version, turns in json.loads(done.stdout.splitlines()[-1]).items():
            milliseconds, wall, cpu = zip(*turns, strict=True)
            native_ms = f"{statistics.median(milliseconds):.1f}"
            rows.append(f"| {name} | {version} | {native_ms} | {_spread(wall)} | {_spread(cpu)} |")
            print(rows[-1], flush=True)
    write(asked, facts, rows)


def _spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.2f}-{max(ratios):.2f})"


def write(asked: argparse.Namespace, facts: dict[str, str], rows: list[str]) -> None:
    """Write benchmarks/results/own-loop.md."""
    before = f" --before {asked.before}" if asked.before else ""
    lines = [
        "# Your own loop beside a hand-written one with DDP: two ranks, Gloo",
        "",
        f"    python benchmarks/own_loop.py{before} --turns {asked.turns}",
        "",
        ", ".join(f"{name} {value}" for name, value in facts.items()) + ".",
        "",
        "| model | run.backward | DDP, ms per step | own / DDP, wall | own / DDP, CPU time |",
        "|---|---|---:|---:|---:|",
        *rows,
        "",
        (
            f"- Medians (min-max) of {asked.turns} turns of {STEPS} pairs of steps, {BATCH} "
            "samples per rank; a turn's ratio is that of its median steps. Target: at most 1.03."
        ),
        (
            "- CPU time is that of rank 0, its Gloo threads included. It says what a step costs "
            "where other processes share the cores; the wall time then says little."
        ),
    ]
    page = "\n".join(lines) + "\n"
    (HERE / "results" / "own-loop.md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
