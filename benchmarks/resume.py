"""Measure what it takes to resume a large run on several ranks: time, and memory of all of them.

    python benchmarks/resume.py [--mib 2048] [--ranks 2] [--rounds 3]

A model of linear layers is trained for one step by Adam, then resumed. The time is that from the
choice of the checkpoint until every rank is restored. Writes `benchmarks/results/resume.md`.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from report import heading, machine

from samestep.base.run.files import sha256_of

PAGE = Path(__file__).parent / "results" / "resume.md"
MOST_RATIO = 1.5
WIDTH = 2048
COPIES = 3
"""Weights, and two numbers for each in Adam."""
EVERY_S = 0.1
COLUMNS = (
    *("read cold, s", "read again, s", "read and hashed once, s", "resumed, s", "over that"),
    *("PSS before, GiB", "at most", "after", "states"),
)
RECIPE = """
from dataclasses import dataclass

import torch
from torch import nn
from samestep import Recipe, Splits

@dataclass(frozen=True)
class Options:
    layers: int = 1

def data(options):
    x = torch.randn(4, {width})
    return Splits(train=(x, x))

def model(options):
    return nn.Sequential(*(nn.Linear({width}, {width}, bias=False) for _ in range(options.layers)))

recipe = Recipe(model=model, data=data, loss=nn.functional.mse_loss, options=Options, metrics={{}},
                settings={{"batch_size": 4, "max_steps": 1, "pictures": False}})
"""
RANK = """
import json, os, sys, time
from pathlib import Path
from samestep.shell.cli import main
from samestep.core.session import training_run

restore = training_run.go_on

def timed(request, work, state, path, world):
    place = Path(os.environ["MEASURED"])
    world.barrier()
    (place / f"begins-{world.rank}").touch()
    while not (place / "go").exists():
        time.sleep(0.01)
    world.barrier()
    began = time.perf_counter()
    found = restore(request, work, state, path, world)
    world.barrier()
    seconds = time.perf_counter() - began
    (place / f"seconds-{world.rank}").write_text(json.dumps(seconds))
    (place / f"done-{world.rank}").touch()
    while not (place / "looked").exists():  # what comes next takes memory of its own
        time.sleep(0.01)
    return found

training_run.go_on = timed
sys.exit(main(sys.argv[1:]))
"""


def main() -> int:
    """Measure, write the page, and return 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=2048, help="size of the state")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: a temporary")
    parser.add_argument("--page", type=Path, default=PAGE)
    asked = parser.parse_args()
    rows, ratios, memories = [], [], []
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        place = Path(folder)
        path = _train(place, asked.mib)
        for turn in range(asked.rounds):
            cold = _read(path, cold=True)
            plain, hashed = _read(path), _timed(lambda: sha256_of(path))
            seconds, before, peak, after = _resume(place, asked.ranks, turn)
            weights = asked.ranks * path.stat().st_size / COPIES
            needed = (peak - before + weights) / path.stat().st_size
            ratios.append(seconds / hashed)
            memories.append(needed)
            gib = [f"{value / 2**30:.2f}" for value in (before, peak, after)]
            times = [f"{value:.2f}" for value in (cold, plain, hashed, seconds, seconds / hashed)]
            rows.append(f"| {' | '.join([*times, *gib, f'{needed:.2f}'])} |")
            print(rows[-1], flush=True)
        size = path.stat().st_size / 2**30
    ratio, memory = statistics.median(ratios), max(memories)
    missed = [f"{ratio:.2f} x the time"] * (ratio > MOST_RATIO)
    missed += [f"{memory:.2f} x the memory"] * (memory > asked.ranks + 1.05)
    lines = [
        *heading(f"Resuming a state of {size:.2f} GiB on {asked.ranks} ranks", machine()),
        f"| {' | '.join(COLUMNS)} |",
        "|---:" * len(COLUMNS) + "|",
        *rows,
        "",
        f"- Targets: {MOST_RATIO} x the time of reading and hashing the file once, memory of ranks",
        f"  + 1 states: {'missed, ' + ', '.join(missed) if missed else 'reached'}.",
        "- PSS: of all ranks together; a page that several have mapped counts once. `before`",
        "  includes the interpreters and the built model.",
        "- states: what is there at most beyond that, with the weights, over the file's size:",
        "  weights and optimizer of each rank, and the mapped file.",
    ]
    asked.page.write_text("\n".join([*lines, ""]))
    return 1 if missed else 0


def _train(place: Path, mib: int) -> Path:
    """Train one step; return the checkpoint."""
    layers = max(1, round(mib * 2**20 / (COPIES * 4 * WIDTH**2)))
    (place / "large.py").write_text(RECIPE.format(width=WIDTH))
    (place / "rank.py").write_text(RANK)
    words = ["train", "large.py", "--run-dir", "run", "--layers", str(layers), "--threads", "1"]
    subprocess.run([sys.executable, "-m", "samestep", *words], cwd=place, check=True)
    (path,) = (place / "run" / "checkpoints").glob("*.pt")
    return path


def _resume(place: Path, ranks: int, turn: int) -> tuple[float, int, int, int]:
    """Resume the run; return seconds, and the PSS of all ranks before, at most, and after."""
    measured = place / f"measured-{turn}"
    measured.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for rank in range(ranks):
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "MEASURED": measured}
        variables = {**os.environ, **{name: str(value) for name, value in names.items()}}
        words = [sys.executable, "rank.py", "train", "run", "--resume", "--threads", "1"]
        started.append(subprocess.Popen(words, cwd=place, env=variables))
    _wait(measured, "begins-*", ranks, started)
    before = peak = _pss(started)
    (measured / "go").touch()
    while len(list(measured.glob("done-*"))) < ranks and all(p.poll() is None for p in started):
        peak = max(peak, _pss(started))
        time.sleep(EVERY_S)
    after = _pss(started)
    (measured / "looked").touch()
    if any(process.wait() for process in started):
        raise SystemExit("a rank has failed")
    return json.loads((measured / "seconds-0").read_text()), before, peak, after


def _wait(folder: Path, pattern: str, count: int, started: list[subprocess.Popen[bytes]]) -> None:
    while len(list(folder.glob(pattern))) < count:
        if any(process.poll() for process in started):
            raise SystemExit("a rank has failed")
        time.sleep(EVERY_S)


def _pss(started: list[subprocess.Popen[bytes]]) -> int:
    total = 0
    for process in started:
        try:
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def _read(path: Path, *, cold: bool = False) -> float:
    """Return the seconds of reading a file once, `cold` from the disk."""
    chunk = bytearray(1 << 20)
    with path.open("rb", buffering=0) as file:
        if cold:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

        def read() -> None:
            while file.readinto(chunk):
                pass

        return _timed(read)


def _timed(function: Any) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


if __name__ == "__main__":
    raise SystemExit(main())
