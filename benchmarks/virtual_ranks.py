"""Measure what `--virtual-ranks` costs: time against DDP and accumulation, and memory.

Both trainings of a row are built in the same processes and take some steps by turns: on a busy
machine, processes of their own differ by more than is to be measured.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peers.virtual_deep import LAYERS, WIDTH
from report import machine
from torch.profiler import ProfilerActivity, profile

from samestep.core.data.order import held_parts
from samestep.core.learner.device import switched
from samestep.core.learner.tree import roots_over
from samestep.core.session.build import build
from samestep.core.session.request import Request
from samestep.core.training.loop import rehearse
from samestep.launch.ranks.world import World, find_world, join, leave
from samestep.shell.commands.train import parse

HERE = Path(__file__).parent
IMAGES, DEEP = HERE / "peers" / "virtual_images.py", HERE / "peers" / "virtual_deep.py"
GLOBAL_BATCH, BUCKET_MIB = 128, 25
BYTES = 4 * LAYERS * WIDTH * (WIDTH + 1)
"""Of the gradients of the deep model."""
MODELS = {"ConvNet": "convnet", "ResNet-18, width 16": "resnet"}
LAYOUTS = ((8, 1), (8, 2), (8, 4), (9, 3), (4, 3))
"""Virtual and real ranks of the rows on memory."""

TIME_NOTES = """\
- Whole training steps of {batch} made-up images of 3 x 32 x 32, with the crops and flips of the
  cifar10 recipe and Adam; one thread per rank, ranks connected by Gloo.
- {turns} turns, each of {steps} steps of either training in the same processes, every other turn
  in reverse order. A ratio is the samples per second of virtual ranks divided by those of the other
  in the same turn; the median of the turns counts.
"""
MEMORY_NOTES = """\
- A model of {layers} linear layers of width {width}, {mib} MiB, with one sample per virtual rank;
  SGD without momentum. The rank that takes most counts.
- The first two columns are the account that PyTorch's allocator gives to its profiler. Resident is
  what the system counts, VmHWM less VmRSS before the first step. It has Gloo's own buffers and the
  profiler's records, too, and the holes that glibc keeps between tensors.
- The goal is log2(V / W) + 1 where each rank's virtual ranks are one subtree, 2 log2(V) otherwise.
- Among several ranks there are two rooms for the exchange of a bucket of 25 MiB, here a quarter of
  a gradient each. They do not grow with the model, and are allowed beside the goal.
"""


@dataclass(frozen=True)
class Job:
    """A row: virtual ranks against what they are compared with."""

    name: str
    virtual: int
    ranks: int
    accumulate: int
    """Micro-steps of each rank in what it is compared with."""
    limit: float


JOBS = (
    Job("DDP", 2, 2, 1, 0.95),
    Job("accumulation of 8 micro-steps", 8, 1, 8, 0.97),
    Job("accumulation of 2 × 4 micro-steps", 8, 2, 4, 0.97),
)


class Steps:
    """The steps of a training that never ends, on one rank."""

    def __init__(self, world: World, *flags: str) -> None:
        _, request = parse([*flags, "--device", "cpu", "--threads", "1"])
        options = request.recipe.complete_options(request.options)
        self._request: Request = replace(request, options=options)
        self._device = world.device
        with switched(self._request.settings, self._device):
            training = build(self._request, world)
            self._steps: Iterator[object] = rehearse(training.work.endless(), training.state)

    def take(self, number: int) -> None:
        """Take some steps, with the switches that a run of this training has."""
        with switched(self._request.settings, self._device):
            for _ in range(number):
                next(self._steps)


def rank() -> None:
    """Measure one row on this rank; rank 0 prints what it found as JSON."""
    asked = json.loads(os.environ["BENCH_JOB"])
    world = find_world("cpu")
    join(world)
    found = _memory(world, asked) if asked["kind"] == "memory" else _turns(world, asked)
    found = world.gather(found)
    if world.is_main:
        print("FOUND " + json.dumps(found), flush=True)
    leave(world)


def _turns(world: World, asked: dict[str, Any]) -> list[tuple[float, float]]:
    """Return the seconds of each turn, of both trainings."""
    common = (str(IMAGES), "--model", asked["model"], "--batch-size", str(GLOBAL_BATCH))
    trainings = {
        "other": Steps(world, *common, "--accumulate", str(asked["accumulate"])),
        "virtual": Steps(world, *common, "--virtual-ranks", str(asked["virtual"])),
    }
    found = []
    for number in range(asked["turns"] + 1):
        seconds = {}
        for name in sorted(trainings, reverse=bool(number % 2)):
            world.barrier()
            start = time.perf_counter()
            trainings[name].take(asked["steps"])
            world.barrier()
            seconds[name] = time.perf_counter() - start
        found.append((seconds["other"], seconds["virtual"]))
    trainings.clear()
    return found[1:]  # the first turn warms up


def _memory(world: World, asked: dict[str, Any]) -> dict[str, float]:
    """Return the most memory that a step takes, in gradients of the whole model.

    PyTorch's allocator tells the profiler of each tensor that comes and goes. The system's own
    account of the process is the check: it knows of what Gloo takes, too.
    """
    steps = Steps(world, str(DEEP), *asked["flags"])
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far counts no more
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        steps.take(3)
    highest = _status("VmHWM")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    memory = sorted(
        (float(event["ts"]), event["args"]["Total Allocated"])
        for event in events
        if event.get("name") == "[memory]"
    )
    backward = sorted(
        (float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0)))
        for event in events
        if event.get("name", "").startswith("autograd::engine::evaluate_function")
    )
    return {
        "accumulation": _at_ends(memory, backward) / BYTES,
        "step": max(total for _, total in memory) / BYTES,
        "resident": (highest - before) / BYTES,
    }


def _at_ends(memory: list[tuple[float, int]], spans: list[tuple[float, float]]) -> int:
    """Return the most memory at the end of any span: of a backward, when its gradients are here."""
    most, place, now = 0, 0, 0
    for _, end in sorted(spans, key=lambda span: span[1]):
        while place < len(memory) and memory[place][0] <= end:
            now = memory[place][1]
            place += 1
        most = max(most, now)
    return most


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) << 10


def bound(virtual: int, ranks: int) -> int:
    """Return the most gradients that may be alive on a rank while it accumulates."""
    world = World(world_size=ranks, virtual_ranks=virtual)
    roots = [roots_over(held_parts(world, rank)) for rank in range(ranks)]
    if all(len(held) == 1 and held[0].level == roots[0][0].level for held in roots):
        return roots[0][0].level + 1  # log2(V / W) + 1
    return math.floor(2 * math.log2(virtual))


def start(ranks: int, job: dict[str, Any]) -> list[Any]:
    """Run a row in processes of its own and return what each rank found."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "BENCH_JOB": json.dumps(job)}
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks))
    command = [sys.executable, *(launcher if ranks > 1 else ()), __file__]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    return list(json.loads(line.removeprefix("FOUND ")))


def measure_speed(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the rows on time."""
    rows = []
    for title, model in MODELS.items():
        for job in JOBS:
            told = {"kind": "turns", "model": model, "turns": asked.turns, "steps": asked.steps}
            found = start(job.ranks, told | {"virtual": job.virtual, "accumulate": job.accumulate})[
                0
            ]
            ratios = [other / virtual for other, virtual in found]
            rows.append(
                {
                    "model": title,
                    "job": f"V = {job.virtual}, W = {job.ranks} against {job.name}",
                    "limit": job.limit,
                    "ratio": statistics.median(ratios),
                    "range": (min(ratios), max(ratios)),
                    "ms": [
                        statistics.median(column) / asked.steps * 1e3
                        for column in zip(*found, strict=True)
                    ],
                    "turns": found,
                }
            )
            print(_speed_line(rows[-1]), flush=True)
    return rows


def measure_memory() -> list[dict[str, Any]]:
    """Measure the rows on memory; the rank that takes most counts."""
    rows = []
    for virtual, ranks in ((0, 1), *LAYOUTS):
        flags = ["--batch-size", str(virtual or 8)]
        flags += ["--virtual-ranks", str(virtual)] if virtual else ["--accumulate", "8"]
        found = start(ranks, {"kind": "memory", "flags": flags})
        most = {name: max(one[name] for one in found) for name in found[0]}
        rows.append({"virtual": virtual, "ranks": ranks, **most})
        rows[-1]["rooms"] = 2 * BUCKET_MIB * 2**20 / BYTES if ranks > 1 else 0.0
        rows[-1]["bound"] = bound(virtual, ranks) if virtual else None
        print(_memory_line(rows[-1]), flush=True)
    return rows


def _reached(row: dict[str, Any]) -> bool:
    if "limit" in row:
        return bool(row["ratio"] >= row["limit"])
    return row["bound"] is None or bool(row["accumulation"] - row["rooms"] <= row["bound"])


def _verdict(row: dict[str, Any]) -> str:
    return "reached" if _reached(row) else "NOT REACHED"


def _speed_line(row: dict[str, Any]) -> str:
    other, virtual = row["ms"]
    low, high = row["range"]
    ratio = f"{row['ratio']:.3f} ({low:.2f}-{high:.2f})"
    return (
        f"| {row['model']} | {row['job']} | {other:.1f} | {virtual:.1f} | {ratio} | "
        f"≥ {row['limit']}: {_verdict(row)} |"
    )


def _memory_line(row: dict[str, Any]) -> str:
    name = f"V = {row['virtual']}, W = {row['ranks']}"
    name = name if row["virtual"] else "plain, 8 micro-steps, one rank"
    numbers = " | ".join(f"{row[key]:.2f}" for key in ("accumulation", "step", "resident"))
    aim = f"≤ {row['bound']}: {_verdict(row)}" if row["virtual"] else ""
    return f"| {name} | {numbers} | {aim} |"


def write(
    speed: list[dict[str, Any]], memory: list[dict[str, Any]], turns: int, steps: int
) -> None:
    """Write benchmarks/results/virtual-ranks.md and .json."""
    facts = machine()
    command = " ".join(["python", "benchmarks/virtual_ranks.py", *sys.argv[1:]])
    lines = [
        "# Virtual ranks: what equality to the last bit costs",
        "",
        f"    {command}",
        "",
        ", ".join(f"{key} {value}" for key, value in facts.items()) + ".",
        "",
        "## Time",
        "",
        "| model | | the other, ms per step | virtual ranks, ms | ratio (min-max) | goal |",
        "|---|---|---:|---:|---:|---|",
        *map(_speed_line, speed),
        "",
        TIME_NOTES.format(batch=GLOBAL_BATCH, turns=turns, steps=steps),
        "## Memory of gradients, in gradients of the whole model",
        "",
        "| | end of a backward | whole step | resident, whole step | goal over accumulation |",
        "|---|---:|---:|---:|---|",
        *map(_memory_line, memory),
        "",
        MEMORY_NOTES.format(layers=LAYERS, width=WIDTH, mib=LAYERS * WIDTH * (WIDTH + 1) >> 18),
    ]
    (HERE / "results" / "virtual-ranks.md").write_text("\n".join(lines))
    record = {"command": command, "machine": facts, "speed": speed, "memory": memory}
    (HERE / "results" / "virtual-ranks.json").write_text(json.dumps(record, indent=1) + "\n")


def main() -> int:
    """Measure and write; return 1 if a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--steps", type=int, default=3, help="of either training in each turn")
    parser.add_argument("--only", choices=("memory", "speed"), help="print that, write nothing")
    parser.add_argument("--quick", action="store_true", help="two turns, nothing written")
    asked = parser.parse_args()
    if asked.quick:
        asked.turns = 2
    memory = [] if asked.only == "speed" else measure_memory()
    speed = [] if asked.only == "memory" else measure_speed(asked)
    if not (asked.quick or asked.only):
        write(speed, memory, asked.turns, asked.steps)
    return 0 if all(map(_reached, [*speed, *memory])) else 1


if __name__ == "__main__":
    if "BENCH_JOB" in os.environ:
        rank()
    else:
        sys.exit(main())
