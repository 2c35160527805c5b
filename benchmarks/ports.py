"""Train public PyTorch scripts beside their ports, on the same batches, and write a table.

    python benchmarks/ports.py FOLDER [NAME ...] [--world-sizes 1 2 3]

FOLDER/NAME/ holds `original.py`, a copy of a script that somebody else wrote, and `port.py`, the
same training as a recipe or as a loop of its own (`port.py RUN_DIR`). The original has a function
`run(epochs)` that returns the loss of each step. `epochs` is a list of `Epoch`, each a batch
sampler for its DataLoader; what the script draws for its samples comes from `epoch.batch`.
"""

import argparse
import json
import os
import re
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from report import machine
from torch import Tensor

from samestep.base.file_kinds import opens_run
from samestep.core.data.keyed_random import mix, seed_alike, seed_torch
from samestep.core.data.order import Ordering, epoch_order
from samestep.core.loops.loop_data import OwnBatch
from samestep.shell.cli import main as samestep

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.processes import run_ranks  # they need not import PyTorch again
from tests.verification.forked import verified, verified_loop

KEPT = Path(__file__).parent / "results/ports.json"
PARTS = ("losses", "verify", "speed")
SEED, CPU = 0, torch.device("cpu")

NOTES = """\
Both begin with the same weights, take the same batches, and draw the same dropout. A difference is
the largest relative one of any step's loss, in fp32: of the port on one rank to the original, and
of the port on more ranks to itself on one. With a * all ranks share {most} virtual ranks: otherwise
dropout and BatchNorm differ by intent. Lines are neither blank nor comments; a port imports the
model of its original. Samples/s are of training alone, per second of CPU time, in the fastest epoch
after the first, on one rank and one thread; medians, and a range, of {rounds} rounds in turn.
"""


class Epoch(list[list[int]]):
    """The batches of an epoch. To go through them seeds each step and notes when it began."""

    def __init__(self, batches: list[list[int]], number: int, first_step: int) -> None:
        super().__init__(batches)
        self.number, self.first_step, self.samples = number, first_step, sum(map(len, batches))

    def __iter__(self) -> Iterator[list[int]]:
        started = time.perf_counter()
        for step, indices in enumerate(super().__iter__(), self.first_step):
            seed_torch(mix(SEED, 0, step), CPU)  # dropout then draws what it draws in the port
            rows: dict[str, Any] = {"rows": len(indices), "indices": torch.tensor(indices)}
            rows |= {"weight": 1.0, "global_size": len(indices), "epoch": self.number}
            self.batch = OwnBatch(data=None, device=CPU, seed=SEED, **rows)
            yield indices
        self.seconds = time.perf_counter() - started


def train_original(script: Path, batches: list[list[list[int]]]) -> dict[str, Any]:
    """Train the original on these batches of each epoch, in a process of its own."""
    time.perf_counter = time.process_time
    epochs: list[Epoch] = []
    for number, each in enumerate(batches):
        epochs.append(Epoch(each, number, sum(map(len, epochs))))
    sys.path.insert(0, str(script.parent))
    run = runpy.run_path(str(script))["run"]
    seed_alike(SEED)
    losses = [float(loss) for loss in run(epochs)]
    return {"losses": losses, "speeds": [e.samples / e.seconds for e in epochs]}


def train_rank(port: Path, run: Path, *flags: str) -> None:
    """Train the port as one rank, in a process of its own."""
    if "RANK" not in os.environ:
        time.perf_counter = time.process_time  # a machine that is busy otherwise does not show
    if opens_run(port.read_bytes()):
        sys.argv, sys.path[:0] = [str(port), str(run)], [str(port.parent)]
        runpy.run_path(str(port), run_name="__main__")
    else:
        how = ["--run-dir", str(run), "--seed", str(SEED), "--device", "cpu", *flags]
        assert samestep(["train", str(port), *how]) == 0


def train_port(port: Path, folder: Path, ranks: int, *flags: str) -> dict[str, Any]:
    """Train the port; return its sizes, and losses and speeds as of the original."""
    run_ranks(train_rank, ranks, folder / "ranks", port, folder / "run", *flags)
    start, *events = map(json.loads, (folder / "run/events.jsonl").read_text().splitlines())
    losses = [e["loss"] for e in events if e["event"] == "step"]
    speeds = [e["samples_per_s"] for e in events if e["event"] == "epoch"]
    return start | {"losses": losses, "speeds": speeds}


def batches_of(start: dict[str, Any]) -> list[list[list[int]]]:
    """Return the samples of each step of each epoch, in samestep's own order."""
    number, size, found = start["num_samples"], start["global_batch_size"], []
    how = Ordering(order=start.get("order") or "shuffled")
    for epoch in range(start["epochs"]):
        order = epoch_order(number, SEED, epoch, how, global_batch=size)[0:number]
        found.append(list(map(Tensor.tolist, order.split(size)))[: start["steps_per_epoch"]])
    return found


def difference(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Return the largest relative difference of any step's loss; each step has one."""
    pairs = zip(ours["losses"], theirs["losses"], strict=True)
    return max(abs(a - b) / abs(b or 1e-12) for a, b in pairs)


def measure(folder: Path, part: str, sizes: list[int], rounds: int) -> dict[str, Any]:
    """Return a part of a row of the table."""
    original, port = folder / "original.py", folder / "port.py"
    with tempfile.TemporaryDirectory(prefix="samestep-ports-") as directory:
        scratch = Path(directory)
        if part == "verify":
            how: dict[str, Any] = {"folder": scratch, "sizes": tuple(sizes)}
            if opens_run(port.read_bytes()):
                found = verified_loop(port, str(scratch / "run"), quick=False, **how)
            else:
                found = verified(port, "--seed", str(SEED), lightning=True, **how)
            causes = sorted({c.cause.name for c in found.checks if c.cause and c.cause.name})
            return {"verify": ", ".join(["same" if found.same else "not the same", *causes])}
        ours, theirs = [], []
        for turn in range(rounds if part == "speed" else 1):
            ours.append(train_port(port, scratch / f"1-{turn}", 1))
            place, batches = scratch / f"o-{turn}", batches_of(ours[0])
            theirs += run_ranks(train_original, 1, place, original, batches)
        if part == "speed":
            both = [[max(one["speeds"][1:]) for one in runs] for runs in (theirs, ours)]
            ratios = [mine / other for other, mine in zip(*both, strict=True)]
            return {"samples_per_s": list(map(statistics.median, both)), "ratios": sorted(ratios)}
        virtual = ["--virtual-ranks", str(max(sizes))] if "accepts=" in port.read_text() else []
        alone = train_port(port, scratch / "virtual", 1, *virtual) if virtual else ours[0]
        others = {n: train_port(port, scratch / f"{n}", n, *virtual) for n in sizes if n > 1}
    return {
        "source": original.read_text().splitlines()[0].strip('"'),
        "kind": "own loop" if opens_run(port.read_bytes()) else "recipe",
        "lines": [len(re.findall(r"(?m)^ *[^#\s]", f.read_text())) for f in (original, port)],
        "steps": ours[0]["total_steps"],
        "difference": difference(ours[0], theirs[0]),
        "ranks": {n: difference(other, alone) for n, other in others.items()},
        "virtual": bool(virtual),
    }


def page(rows: dict[str, dict[str, Any]]) -> str:
    """Return the table as Markdown."""
    sizes = sorted({size for row in rows.values() for size in row.get("ranks", ())}, key=int)
    ranks = [f"{size} ranks" for size in sizes]
    heads = ["training", "kind", "lines", "steps", "to the original", *ranks]
    lines = [f"| {' | '.join([*heads, 'samples/s', 'ratio', '`verify`'])} |"]
    lines.append("|---|---|" + "---:|" * len(heads) + "---|")
    for row in (row for row in rows.values() if "steps" in row):
        star, ratios = "*" * row["virtual"], row.get("ratios", [float("nan")])
        numbers = [f"{row['difference']:.0e}", *(f"{row['ranks'][n]:.0e}{star}" for n in sizes)]
        cells = [row["source"], row["kind"], " → ".join(map(str, row["lines"])), str(row["steps"])]
        speeds = " → ".join(f"{speed:,.0f}" for speed in row.get("samples_per_s", ()))
        ratio = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
        cells += [*numbers, speeds, ratio, row.get("verify", "not run")]
        lines.append(f"| {' | '.join(cells)} |")
    rounds = max(len(row.get("ratios", ())) for row in rows.values())
    facts = ", ".join(f"{name} {value}" for name, value in machine().items())
    head = f"# Public trainings, ported\n\n    python benchmarks/ports.py FOLDER\n\n{facts}.\n"
    return "\n".join([head, NOTES.format(most=sizes[-1], rounds=rounds), *lines, ""])


def main() -> None:
    """Measure what is asked for, and write the table of all that ever was."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where NAME/original.py and NAME/port.py are")
    parser.add_argument("names", nargs="*", help="only these; others stay")
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rounds", type=int, default=3, help="of original and port, for speed")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    asked = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "NO_COLOR": "1"}
    rows = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for name in asked.names or [port.parent.name for port in asked.folder.glob("*/port.py")]:
        for part in asked.parts:
            found = measure(asked.folder / name, part, asked.world_sizes, asked.rounds)
            rows[name] = rows.get(name, {}) | json.loads(json.dumps(found))
            KEPT.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
            print(name, json.dumps(found), flush=True)
    KEPT.with_suffix(".md").write_text(page({n: rows[n] for n in sorted(rows)}))


if __name__ == "__main__":
    main()
