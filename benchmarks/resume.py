"""Measure how long ranks take to resume from a large checkpoint, and how much memory that takes.

    python benchmarks/resume.py [--mib 2048] [--nproc 2] [--rounds 3]

The time is over that of reading the file once, both from the disk (the page cache is emptied before
each). The memory is that of all ranks together, each shared page counted once (PSS), over the size
of the state. Writes `benchmarks/results/resume.md`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from report import machine
from torch import nn

from samestep import dist
from samestep.run import checkpoints
from samestep.run.index import Entry, Index, announce
from samestep.session.build import load_newest
from samestep.training.optimizer import load_state
from samestep.training.prepare import match_layouts
from samestep.training.snapshot import load_model

PAGE = Path(__file__).parent / "results" / "resume.md"
MOST_TIMES, LAYERS = 1.5, 24


def main() -> int:
    """Measure, write the page, and return 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=2048, help="size of the state")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: a temporary")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank_of is not None:
        _resume(asked.rank_of, asked.mib)
        return 0
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        run = Path(name)
        file = _write(run, asked.mib)
        size = file.stat().st_size
        reads, resumes, peaks = [], [], []
        for _ in range(asked.rounds):
            reads.append(_read(file))
            words = ["-m", "torch.distributed.run", "--nproc-per-node", str(asked.nproc), __file__]
            words += ["--rank-of", name, "--mib", str(asked.mib)]
            subprocess.run([sys.executable, *words], check=True)
            told = json.loads((run / "told.json").read_text())
            resumes.append(told["seconds"])
            peaks.append(told["peak"] / size)
    one, other, peak = map(statistics.median, (reads, resumes, peaks))
    good = other <= MOST_TIMES * one and peak <= asked.nproc + 1
    spread = f"{other:.2f} ({min(resumes):.2f}-{max(resumes):.2f})"
    verdict = "reached" if good else "missed"
    lines = [
        "# Resuming from a large checkpoint",
        "",
        f"    python benchmarks/resume.py {' '.join(sys.argv[1:])}".rstrip(),
        "",
        ", ".join(f"{name} {value}" for name, value in machine().items()) + ".",
        "",
        "| ranks | file, MiB | reading it once, s | resuming, s (min-max) | ratio | peak / state |",
        "|---:|---:|---:|---:|---:|---:|",
        f"| {asked.nproc} | {size >> 20} | {one:.2f} | {spread} | {other / one:.2f} | {peak:.2f} |",
        "",
        f"- Targets: {MOST_TIMES} x reading it once, a peak of ranks + 1 states: {verdict}.",
        f"- Medians of {asked.rounds} rounds. The ranks have a model and an optimizer already, as",
        "  before a resume. Rank 0 checks the hash; all restore weights and optimizer. The memory",
        "  is that when all is restored and the file is still mapped, without what the ranks held",
        "  before the model was there.",
    ]
    PAGE.write_text("\n".join([*lines, ""]))
    print("\n".join(lines))
    return 0 if good else 1


def _built(mib: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and an AdamW that has taken a step: a state of so many MiB."""
    width = int((mib * 2**20 / 4 / 3 / LAYERS) ** 0.5)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
    return model, torch.optim.AdamW(model.parameters())


def _write(run: Path, mib: int) -> Path:
    model, optimizer = _built(mib)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    folder = run / "checkpoints"
    folder.mkdir()
    content = {"format": checkpoints.FORMAT, "model": model.state_dict()}
    content["optimizer"] = optimizer.state_dict()
    digest = checkpoints.save(folder, "checkpoint_epoch_1.pt", content)
    entry = Entry(path="checkpoint_epoch_1.pt", step=1, epoch=1, sha256=digest)
    announce(folder, Index(), entry, None)
    (run / "events.jsonl").touch()
    return folder / entry.path


def _forget(file: Path) -> None:
    """Let the next reading come from the disk."""
    with file.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(file: Path) -> float:
    _forget(file)
    chunk = memoryview(bytearray(1 << 20))
    began = time.perf_counter()
    with file.open("rb", buffering=0) as opened:
        while opened.readinto(chunk):
            pass
    return time.perf_counter() - began


def _pss(process: int) -> int:
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def _resume(run: Path, mib: int) -> None:
    """Resume on this rank; rank 0 writes how long that took on all ranks, and their memory."""
    dist.setup_distributed("cpu")
    world = dist.current_world()
    processes = world.gather(os.getpid())
    small, stepped = _built(1)
    small(torch.ones(1, small[0].in_features)).sum().backward()
    stepped.step()  # what PyTorch imports for it is no part of the state
    empty = sum(map(_pss, processes)) if world.is_main else 0
    world.barrier()
    model, optimizer = _built(mib)
    file = run / "checkpoints" / "checkpoint_epoch_1.pt"
    if world.is_main:
        _forget(file)
    world.barrier()
    began = time.perf_counter()
    found = load_newest(run, world)
    assert found is not None
    load_model(model, found.content)
    load_state(optimizer, found.content["optimizer"])
    match_layouts(optimizer)
    world.barrier()
    seconds = time.perf_counter() - began
    if world.is_main:  # all is there now: the file, and what each rank has made of it
        peak = sum(map(_pss, processes)) - empty
        (run / "told.json").write_text(json.dumps({"seconds": seconds, "peak": peak}))
    world.barrier()
    del found
    dist.cleanup()


if __name__ == "__main__":
    raise SystemExit(main())
