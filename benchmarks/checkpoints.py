"""Measure how long a checkpoint blocks the training, beside torch.save and fsync of the same state.

    python benchmarks/checkpoints.py [--mib 128,1024] [--rounds 7]

Both write the same tensors to the same disk, in turn. Writes `benchmarks/results/checkpoints.md`.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from report import machine

from samestep.run import checkpoints
from samestep.run.index import Entry

PAGE = Path(__file__).parent / "results" / "checkpoints.md"
TENSORS = 32
TARGET = 1.3


def main() -> int:
    """Measure, write the page, and return 1 if the target was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", default="128,1024", help="sizes of the state")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: a temporary")
    asked = parser.parse_args()
    facts = machine()
    rows, good = [], True
    for size in map(int, asked.mib.split(",")):
        with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
            row, ratio = _measure(Path(folder), size, asked.rounds)
        print(row, flush=True)
        rows.append(row)
        good = good and ratio <= TARGET
    lines = [
        "# Checkpoints: how long one blocks the training",
        "",
        f"    python benchmarks/checkpoints.py {' '.join(sys.argv[1:])}".rstrip(),
        "",
        ", ".join(f"{name} {value}" for name, value in facts.items()) + ".",
        "",
        "| MiB | torch.save + fsync, s | samestep, s | ratio (min-max) | loading, s |",
        "|---:|---:|---:|---:|---:|",
        *rows,
        "",
        f"- Target: samestep ≤ {TARGET} x torch.save + fsync: {'reached' if good else 'missed'}.",
        f"- Medians of {asked.rounds} rounds, both in turn; the ratio is that of the medians, the",
        "  range that of the rounds. Both write a file that is new. samestep also hashes it and",
        "  renames it.",
    ]
    PAGE.write_text("\n".join([*lines, ""]))
    return 0 if good else 1


def _measure(folder: Path, mib: int, rounds: int) -> tuple[str, float]:
    rows = mib * 2**20 // 4 // TENSORS
    model = {f"weight {n}": torch.randn(rows) for n in range(TENSORS)}
    state: dict[str, Any] = {"format": checkpoints.FORMAT, "model": model}
    plain: list[float] = []
    ours: list[float] = []
    turns: list[tuple[list[float], Callable[[], object]]] = [
        (plain, lambda: _save_plainly(folder / "plain.pt", state)),
        (ours, lambda: checkpoints.save(folder, "ours.pt", state)),
    ]
    for _ in range(rounds):
        for seconds, save in turns:
            # As in a run, to a name that is new. What is freed between two turns returns to the
            # memory of both: who overwrites a file writes into pages that it has just freed.
            for old in folder.iterdir():
                old.unlink()
            seconds.append(_seconds(save))
        turns.reverse()  # a disk may be slower after a write
    digest = checkpoints.save(folder, "ours.pt", state)
    entry = Entry(path="ours.pt", step=1, epoch=1, sha256=digest)
    loaded = [_seconds(lambda: checkpoints.load(folder, entry)) for _ in range(3)]
    each = sorted(b / a for a, b in zip(plain, ours, strict=True))
    one, other, load = map(statistics.median, (plain, ours, loaded))
    ratio = other / one
    spread = f"{ratio:.2f} ({each[0]:.2f}-{each[-1]:.2f})"
    return f"| {mib} | {one:.3f} | {other:.3f} | {spread} | {load:.3f} |", ratio


def _save_plainly(path: Path, state: dict[str, Any]) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def _seconds(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


if __name__ == "__main__":
    raise SystemExit(main())
