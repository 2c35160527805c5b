"""Measure what grows: small tensors, runs, records, jobs, a checkpoint, the memory of a training.

    python benchmarks/scale_limits.py [--only tensors,runs,report,jobs,async,memory] [--rounds 5]

Each figure beside a peer's, or a limit, in one run. Writes `benchmarks/results/scale-limits.md`.
"""

import argparse
import os
import random
import statistics
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import checkpoints
import report_page
import runs_listing
import torch
import torch.distributed as dist
from report import heading, machine

HERE = Path(__file__).parent
PAGE = HERE / "results" / "scale-limits.md"
SAMESTEP = (sys.executable, "-m", "samestep")
TENSORS, RUNS, RECORDS, JOBS = 100_000, 5_000, 1_000_000, 500
MEMORY_MB = 300
IMAGES = 12_800
Line = tuple[str, str, str, bool]
"""What, measured, limit, and whether it was reached."""


def main() -> int:
    """Measure, write the page, and return 1 if a limit was not kept."""
    parts: dict[str, Callable[[Path, int], Iterator[Line]]] = {
        "tensors": small_tensors,
        "runs": many_runs,
        "report": long_run,
        "jobs": many_jobs,
        "async": in_the_background,
        "memory": memory,
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[*parts])
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    facts, lines = machine(), list[Line]()
    torch.set_num_threads(1)
    for name in asked.only:
        # On a disk: in memory nothing waits for a sync.
        with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
            for line in parts[name](Path(folder), asked.rounds):
                print(*line, sep="  ", flush=True)
                lines.append(line)
    rows = [f"| {what} | {found} | {limit} | {_told(good)} |" for what, found, limit, good in lines]
    table = ["| what | measured | limit | |", "|---|---:|---:|---|", *rows]
    notes = [
        f"- Medians of {asked.rounds} rounds, all ways in turn; ratios are of the medians.",
        f"- Small tensors: {TENSORS:,} of 16 numbers. Blocked: until the training goes on. Total:",
        "  until the file is on the disk, for samestep also hashed and named in the index.",
        "- Memory: the largest resident set of the process, for both mostly PyTorch's own code. A",
        "  spiral's picture is drawn by Matplotlib, once the training has ended.",
    ]
    PAGE.write_text("\n".join([*heading("Limits: what grows", facts), *table, "", *notes, ""]))
    return int(not all(good for *_, good in lines))


def _told(good: bool) -> str:
    return "reached" if good else "**missed**"


def small_tensors(folder: Path, rounds: int) -> Iterator[Line]:
    """Save very many small tensors, by us, `torch.save` and DCP; the last once, for its minutes."""
    model = {f"layer.{n}.weight": torch.randn(16) for n in range(TENSORS)}
    blocked, whole = _saved(folder, model, rounds, ("samestep", "torch.save + fsync"))
    by_dcp, _ = _saved(folder, model, 0, ("DCP, save",))
    blocked |= by_dcp
    whole |= by_dcp
    for kind, times in (("blocked", blocked), ("total", whole)):
        for peer in ("torch.save + fsync", "DCP, save"):
            yield _ratio(f"{TENSORS:,} small tensors, {kind}, over {peer}", times, peer, 0.5)


def in_the_background(folder: Path, rounds: int) -> Iterator[Line]:
    """Save in the background, beside what others have for that."""
    peers = ("torch_checkpointing", "DCP, async_save in a process", "Lightning, AsyncCheckpointIO")
    for mib in (128, 1024):
        numbers = mib * 2**20 // 4 // checkpoints.TENSORS
        model = {f"weight {n}": torch.randn(numbers) for n in range(checkpoints.TENSORS)}
        blocked, _ = _saved(folder, model, rounds, ("samestep", *peers))
        best = min(blocked.keys() - {"samestep"}, key=lambda name: statistics.median(blocked[name]))
        yield _ratio(f"{mib} MiB, blocked, over the best of others, {best}", blocked, best, 0.8)


def _saved(
    folder: Path, model: dict[str, torch.Tensor], rounds: int, names: Sequence[str]
) -> tuple[checkpoints.Times, checkpoints.Times]:
    """Return the seconds for which each way blocks, and until all is on the disk."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        meet = f"file://{place}/meet"
        dist.init_process_group("gloo", init_method=meet, rank=0, world_size=1)
        try:
            return checkpoints.measure(Path(place), model, max(rounds, 1), names, warm=rounds > 0)
        finally:
            dist.destroy_process_group()


def _ratio(what: str, times: checkpoints.Times, peer: str, limit: float) -> Line:
    ours, its = (statistics.median(times[name]) for name in ("samestep", peer))
    return what, f"{ours / its:.2f} ({ours:.3f} s, {its:.3f} s)", f"≤ {limit}", ours <= limit * its


def many_runs(folder: Path, rounds: int) -> Iterator[Line]:
    """List a folder of runs."""
    run = runs_listing.train(folder / "one" / "run")
    runs_listing.copy(run, folder / "many", RUNS)
    seconds = [_took((*SAMESTEP, "runs", str(folder / "many")))[0] for _ in range(rounds + 1)][1:]
    yield _within(f"`runs` over {RUNS:,} runs, s", seconds, 1)


def long_run(folder: Path, rounds: int) -> Iterator[Line]:
    """Make the report of a long run."""
    report_page.write_run(folder / "run", RECORDS)
    took = [_took((*SAMESTEP, "report", str(folder / "run"))) for _ in range(rounds)]
    yield _within(f"`report` of {RECORDS:,} records, s", [seconds for seconds, _ in took], 5)
    yield _within("its memory, MB", [megabytes for _, megabytes in took], MEMORY_MB)


def many_jobs(folder: Path, rounds: int) -> Iterator[Line]:
    """Ask for the jobs of a stand-in for Slurm's `squeue`, each with a run."""
    run = runs_listing.train(folder / "one" / "run")
    runs_listing.copy(run, folder / "runs", JOBS)
    rows = []
    for number, path in enumerate(sorted((folder / "runs").iterdir()), 1000):
        values = (number, "x", "me", "RUNNING", "None", "node1", 0, "10:00", "UNLIMITED", "Unknown")
        fields = (*values, 0, "", "", f"samestep:{path}", "", "")
        rows.append("\x1f".join(map(str, fields)) + "\x1f\n")
    (folder / "queue").write_text("".join(rows))
    squeue = folder / "squeue"
    squeue.write_text(f"#!/bin/sh\nexec cat {folder}/queue\n")
    squeue.chmod(0o755)
    env = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    command = (*SAMESTEP, "slurm", "status")
    shown = subprocess.run(command, env=env, cwd=folder, check=True, capture_output=True, text=True)
    assert str(1000 + JOBS - 1) in shown.stdout, shown.stdout[-300:]
    seconds = [_took(command, env=env, cwd=folder)[0] for _ in range(rounds)]
    yield _within(f"`slurm status` of {JOBS} jobs, s", seconds, 2)


def memory(folder: Path, rounds: int) -> Iterator[Line]:
    """Compare the memory of trainings with that of plain loops."""
    draw = random.Random(1)
    for split in ("train", "t10k"):
        pixels = draw.randbytes(IMAGES * 784)
        labels = bytes(draw.randrange(10) for _ in range(IMAGES))
        head = struct.pack(">IIII", 2051, IMAGES, 28, 28)
        (folder / f"{split}-images-idx3-ubyte").write_bytes(head + pixels)
        head = struct.pack(">II", 2049, IMAGES)
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(head + labels)
    data, peers = ("--data-dir", str(folder)), HERE / "peers"
    kinds = {
        "the spiral": (spiral := ("spiral_plain.py", "5"), ("spiral", "--epochs", "5")),
        "the spiral, without its picture": (spiral, ("spiral", "--epochs", "5", "--no-pictures")),
        "the ConvNet": (("mnist_plain.py", "2", *data), ("mnist", "--epochs", "2", *data)),
    }
    for name, ((script, epochs, *more), words) in kinds.items():
        plain = (sys.executable, str(peers / script), "--epochs", epochs, *more)
        ours: list[float] = []
        its: list[float] = []
        for turn in range(rounds):
            its.append(_took(plain)[1])
            run = ("--run-dir", str(folder / f"{name}-{turn}"), "--threads", "1")
            ours.append(_took((*SAMESTEP, "train", *words, *run))[1])
        mine, other = statistics.median(ours), statistics.median(its)
        found = f"{mine / other:.2f} ({mine:.0f} MB, {other:.0f} MB)"
        yield f"memory of {name}, over a plain loop's", found, "≤ 1.15", mine <= 1.15 * other


def _within(what: str, found: list[float], limit: float) -> Line:
    middle = statistics.median(found)
    shown = f"{middle:.3g} ({min(found):.3g}-{max(found):.3g})"
    return what, shown, f"≤ {limit}", middle <= limit


_LAUNCHER = """import resource, subprocess, sys, time
began = time.perf_counter()
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"""
"""Starts a command: what it counts of a child of ours begins at the memory of this process."""


def _took(command: Sequence[str], **how: Any) -> tuple[float, float]:
    """Return the seconds of a command, and its largest resident set in MB."""
    words = [sys.executable, "-c", _LAUNCHER, *command]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, **how)
    seconds, kib = done.stdout.split()
    return float(seconds), int(kib) * 1.024e-3


if __name__ == "__main__":
    raise SystemExit(main())
