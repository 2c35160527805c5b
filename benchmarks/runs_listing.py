"""Measure how long `samestep runs` takes to list a folder of many runs.

    python benchmarks/runs_listing.py [--runs 1000] [--rounds 7]

One run of the spiral recipe, with its 30 epochs, is trained and copied. A second folder holds ten
times as many damaged runs, a third a run of 100 MiB. Writes `benchmarks/results/runs-listing.md`.
"""

import argparse
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import machine

PAGE = Path(__file__).parent / "results" / "runs-listing.md"
TARGET_S = 1.0
SAMESTEP = (sys.executable, "-m", "samestep")
LARGE_BYTES = 100 * 2**20


def main() -> int:
    """Measure, write the page, and return 1 if the target was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    facts = machine()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        run = train(folder / "one" / "run")
        size = (run / "events.jsonl").stat().st_size
        copy(run, folder / "many", asked.runs)
        _damage(folder / "damaged", asked.runs * 10)
        _enlarge(run)
        commands = {
            "`samestep runs --help`": ("runs", "--help"),
            f"{asked.runs:,} runs": ("runs", str(folder / "many")),
            f"{asked.runs:,} runs, --json": ("runs", str(folder / "many"), "--json"),
            f"{asked.runs * 10:,} damaged runs": ("runs", str(folder / "damaged")),
            "1 run, 100 MiB of events.jsonl": ("runs", str(folder / "one")),
        }
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(asked.rounds):
            for name, command in commands.items():
                seconds[name].append(_seconds(command))
    wanted = statistics.median(seconds[f"{asked.runs:,} runs"])
    verdict = "reached" if wanted <= TARGET_S else "missed"
    lines = [
        "# Listing runs: how long `samestep runs` takes",
        "",
        f"    python benchmarks/runs_listing.py {' '.join(sys.argv[1:])}".rstrip(),
        "",
        ", ".join(f"{name} {value}" for name, value in facts.items()) + ".",
        "",
        "| folder | s (min-max) |",
        "|---|---:|",
        *(
            f"| {name} | {statistics.median(one):.2f} ({min(one):.2f}-{max(one):.2f}) |"
            for name, one in seconds.items()
        ),
        "",
        f"- Target: {asked.runs:,} runs in ≤ {TARGET_S:g} s: {verdict}.",
        f"- Medians of {asked.rounds} rounds, each a fresh process, with the files in the system's",
        f"  cache. A run is the spiral recipe's: 30 epochs, {size / 1000:.0f} kB of events.jsonl.",
    ]
    PAGE.write_text("\n".join([*lines, ""]))
    print("\n".join(lines))
    return int(wanted > TARGET_S)


def train(run: Path) -> Path:
    """Train the spiral; return its run, without the checkpoints."""
    command = (*SAMESTEP, "train", "spiral", "--run-dir", str(run))
    subprocess.run(command, check=True, capture_output=True)
    for checkpoint in (run / "checkpoints").glob("*.pt"):  # the listing reads none
        checkpoint.unlink()
    return run


def copy(run: Path, folder: Path, count: int) -> None:
    """Fill a folder with so many copies of a run."""
    for number in range(count):
        shutil.copytree(run, folder / f"spiral-20260101-{number:06}-abcd")


def _damage(folder: Path, count: int) -> None:
    """Write empty directories, torn JSON and garbage in turn."""
    for number in range(count):
        run = folder / f"damaged-{number}"
        run.mkdir(parents=True)
        if number % 3 == 1:
            (run / "events.jsonl").write_text('{"event": "start", "ti')
        if number % 3 == 2:
            (run / "events.jsonl").write_bytes(bytes(range(256)) * 16)


def _enlarge(run: Path) -> None:
    """Repeat the steps of a run until its records have 100 MiB."""
    events = run / "events.jsonl"
    first, *lines = events.read_bytes().splitlines(keepends=True)
    steps = b"".join(line for line in lines if re.match(rb'\{"event": "step"', line))
    with events.open("wb") as file:
        file.write(first)
        for _ in range(LARGE_BYTES // len(steps)):
            file.write(steps)
        file.writelines(lines)


def _seconds(command: tuple[str, ...]) -> float:
    began = time.perf_counter()
    subprocess.run((*SAMESTEP, *command), check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


if __name__ == "__main__":
    raise SystemExit(main())
