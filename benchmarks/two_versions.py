"""Compare the speed of two checkouts, each with an environment of its own, in turn.

    python benchmarks/two_versions.py OLD_PYTHON NEW_PYTHON [--rounds 9] [--data-dir DIR]

DIR has the IDX files of MNIST or Fashion-MNIST; without it that row is left out. Every other round
is in reverse order, and a ratio is old seconds / new seconds of the same round, so that 1 or more
means that nothing got slower. Writes `benchmarks/results/two-versions.md`.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from measure import environment
from report import machine

PAGE = Path(__file__).parent / "results" / "two-versions.md"
COPIES = 300
# A checkpoint is written beside the next epoch, and takes its part of a core: none is here.
QUIET = ("--no-pictures", "--checkpoint-every-epochs", "10")
SPIRAL = ("train", "spiral", "--epochs", "4", "--num-samples", "40000", *QUIET)
CHECKPOINTS = ("--epochs", "1", "--checkpoint-every-steps", "25", "--keep-top-k", "1")


def main() -> int:
    """Measure, write the page, print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", help="the Python of the older version's environment")
    parser.add_argument("new", help="the Python of the newer one's")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--only", help="rows whose name has this in it")
    asked = parser.parse_args()
    facts = machine()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        env = environment(folder, 1)
        rows = _rows(asked.data_dir)
        if asked.only:
            rows = {name: row for name, row in rows.items() if asked.only in name}
        _listing(asked.old, folder, env)
        pythons = {"old": asked.old, "new": asked.new}
        seconds = {name: {"old": [], "new": []} for name in rows}
        for number in range(asked.rounds):
            for name, (command, measure) in rows.items():
                for version in reversed(pythons) if number % 2 else pythons:
                    run = folder / "run"
                    shutil.rmtree(run, ignore_errors=True)
                    parts = [part.format(run=run, runs=folder / "runs") for part in command]
                    began = time.perf_counter()
                    words = [pythons[version], "-m", "samestep", *parts]
                    subprocess.run(words, env=env, check=True, capture_output=True)
                    wall = time.perf_counter() - began
                    seconds[name][version].append(measure(run) if measure else wall)
            print(f"round {number + 1} of {asked.rounds}", file=sys.stderr, flush=True)
    lines = [
        "# Two versions: is anything slower than it was?",
        "",
        f"    python benchmarks/two_versions.py OLD NEW --rounds {asked.rounds}",
        "",
        ", ".join(f"{name} {value}" for name, value in facts.items()) + ".",
        "",
        "| what | old, s | new, s | old / new, median (min-max) |",
        "|---|---:|---:|---:|",
        *(_line(name, **one) for name, one in seconds.items()),
        "",
        "- Trainings: the median epoch after the first, without checkpoints; checkpoints: the",
        "  median time for which one blocks the training; the others: a whole process.",
        "- One thread per rank.",
    ]
    PAGE.write_text("\n".join([*lines, ""]))
    print("\n".join(lines))
    return 0


def _rows(data_dir: Path | None) -> dict[str, tuple[tuple[str, ...], Callable | None]]:
    """Return each row's command, and what reads its seconds from the run; None: the wall time."""
    run = ("--run-dir", "{run}")
    mnist = ("train", "mnist", "--data-dir", str(data_dir), "--epochs", "4", *QUIET)
    return {
        "spiral": ((*SPIRAL, *run), _epoch_seconds),
        "spiral, two ranks": ((*SPIRAL, "--nproc", "2", *run), _epoch_seconds),
        "spiral, four virtual ranks": ((*SPIRAL, "--virtual-ranks", "4", *run), _epoch_seconds),
        **({"mnist": ((*mnist, *run), _epoch_seconds)} if data_dir else {}),
        "checkpoints": ((*SPIRAL, *CHECKPOINTS, *run), _checkpoint_seconds),
        "`samestep --help`": (("--help",), None),
        "`samestep train spiral --help`": (("train", "spiral", "--help"), None),
        f"`samestep runs`, {COPIES} runs": (("runs", "{runs}"), None),
        "`samestep train spiral`, whole": (("train", "spiral", "--epochs", "2", *run), None),
    }


def _recorded(run: Path, event: str, *fields: str) -> list[float]:
    """Return of each such record the first of these fields that it has."""
    lines = (run / "events.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["event"] == event]
    return [next(record[field] for field in fields if field in record) for record in records]


def _epoch_seconds(run: Path) -> float:
    return statistics.median(_recorded(run, "epoch", "train_seconds")[1:])


def _checkpoint_seconds(run: Path) -> float:
    # Before another thread wrote a checkpoint, all of its seconds blocked.
    return statistics.median(_recorded(run, "checkpoint", "blocked_seconds", "seconds")[1:-1])


def _listing(python: str, folder: Path, env: dict[str, str]) -> None:
    """Train one run and copy it, without its checkpoints, for the listing."""
    run = folder / "one"
    train = [python, "-m", "samestep", "train", "spiral", "--run-dir", str(run)]
    subprocess.run(train, env=env, check=True, capture_output=True)
    for checkpoint in (run / "checkpoints").glob("*.pt"):
        checkpoint.unlink()
    for number in range(COPIES):
        shutil.copytree(run, folder / "runs" / f"run-{number:04}")


def _line(name: str, old: list[float], new: list[float]) -> str:
    ratios = [before / after for before, after in zip(old, new, strict=True)]
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
    return f"| {name} | {statistics.median(old):.4g} | {statistics.median(new):.4g} | {spread} |"


if __name__ == "__main__":
    sys.exit(main())
