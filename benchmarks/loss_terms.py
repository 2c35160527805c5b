"""Measure what `loss_terms` cost: two ranks train a recipe with and without them, by turns.

Both trainings are built in the same two processes and take one step after the other: on a busy
machine, processes of their own differ by more than is to be measured.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from report import machine

from samestep.core.session.build import build
from samestep.core.training.loop import rehearse
from samestep.launch.ranks.world import World, find_world, join, leave
from samestep.shell.commands.train import parse

HERE = Path(__file__).parent
RECIPES = {
    "without": HERE / "peers" / "text_without_terms.py",
    "with": HERE.parent / "examples" / "padded_text.py",
}
STEPS, TURNS, LIMIT = 40, 15, 0.97


def steps_of(path: Path, world: World) -> Iterator[object]:
    """Return the steps of a training that never ends."""
    flags = ("--num-sentences", "2000", "--device", "cpu", "--log-every", "50")
    _, request = parse([str(path), *flags])
    request = replace(request, options=request.recipe.complete_options(request.options))
    training = build(request, world)
    return rehearse(training.work.endless(), training.state)


def turn(trainings: dict[str, Iterator[object]]) -> dict[str, float]:
    """Return the median seconds of some steps of each; they take the same batches by turns."""
    seconds: dict[str, list[float]] = {name: [] for name in trainings}
    for number in range(STEPS):
        for name in sorted(trainings, reverse=bool(number % 2)):
            start = time.perf_counter()
            next(trainings[name])
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def rank() -> None:
    """Take turns on one rank; rank 0 writes the page."""
    torch.set_num_threads(1)
    world = find_world("cpu")
    join(world)
    trainings = {name: steps_of(path, world) for name, path in RECIPES.items()}
    turns = [turn(trainings) for _ in range(TURNS + 1)][1:]
    if world.is_main:
        write(turns)
    trainings.clear()
    leave(world)


def write(turns: list[dict[str, float]]) -> None:
    """Write benchmarks/results/terms.md."""
    ratios = [found["without"] / found["with"] for found in turns]
    median = statistics.median(ratios)
    each = {n: statistics.median(found[n] for found in turns) * 1e3 for n in RECIPES}
    lines = [
        "# Two ranks, Gloo: examples/padded_text.py, batch 8 per rank, with and without loss_terms",
        "",
        "    python benchmarks/loss_terms.py",
        "",
        ", ".join(f"{key} {value}" for key, value in machine().items()) + ".",
        "",
        "| | ms per step |",
        "|---|---:|",
        *(f"| {name} loss_terms | {value:.2f} |" for name, value in each.items()),
        "",
        (
            f"- Target: speed with loss_terms ≥ {LIMIT} x without: {median:.3f} ({min(ratios):.2f}-"
            f"{max(ratios):.2f}), {'reached' if median >= LIMIT else 'NOT REACHED'}."
        ),
        (
            f"- {TURNS} turns, each of {STEPS} pairs of steps on the same batches in the same two "
            "processes; a turn's ratio is that of its median steps, and the median of them counts."
        ),
    ]
    page = "\n".join(lines) + "\n"
    (HERE / "results" / "terms.md").write_text(page)
    print(page)


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank()
    else:
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
        command = [sys.executable, *launcher, __file__]
        sys.exit(subprocess.call(command, env=os.environ | {"OMP_NUM_THREADS": "1"}))
