"""Measure how long the report of a long run takes, how large it is, and how long it takes to open.

    python benchmarks/report_page.py [--records 1000000] [--rounds 5]

The run is made by hand: a record per step. Writes `benchmarks/results/report.md`.
"""

import argparse
import json
import math
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import machine

PAGE = Path(__file__).parent / "results" / "report.md"
MAKE_S, OPEN_S, SIZE_MB = 5.0, 2.0, 8.0
EPOCHS = 10
CHROMIUM = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-quic"),
)


def main() -> int:
    """Measure, write the page, and return 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    facts = machine()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        size = write_run(run, asked.records)
        making = [seconds_of_making(run) for _ in range(asked.rounds)]
        page = run / "report.html"
        page_mb = page.stat().st_size / 1e6
        chromium = shutil.which("chromium")
        empty = Path(folder) / "empty.html"
        empty.write_text("<!doctype html><title>empty</title>")
        opening = [
            seconds_of_opening(chromium, page) for _ in range(asked.rounds if chromium else 0)
        ]
        base = [seconds_of_opening(chromium, empty) for _ in opening]
    made = statistics.median(making)
    opened = statistics.median(opening) - statistics.median(base) if opening else None
    shown = "no Chromium here" if opened is None else f"{opened:.2f}"
    good = made <= MAKE_S and page_mb <= SIZE_MB and (opened is None or opened <= OPEN_S)
    lines = [
        "# The report of a long run",
        "",
        f"    python benchmarks/report_page.py {' '.join(sys.argv[1:])}".rstrip(),
        "",
        ", ".join(f"{name} {value}" for name, value in facts.items()) + ".",
        "",
        f"{asked.records:,} `step` records, {size / 1e6:.0f} MB of `events.jsonl`.",
        "",
        "| what | measured | target |",
        "|---|---:|---:|",
        f"| `samestep report`, s (min-max) | {spread(making)} | ≤ {MAKE_S:g} |",
        f"| size of the page, MB | {page_mb:.2f} | ≤ {SIZE_MB:g} |",
        f"| opening it in Chromium, s | {shown} | ≤ {OPEN_S:g} |",
        "",
        f"- Targets: {'reached' if good else 'missed'}.",
        f"- Medians of {asked.rounds} rounds, of the whole command with its start. Opening is",
        "  what headless Chromium takes from its start until all charts are drawn, less",
        "  what it takes for an empty page.",
    ]
    PAGE.write_text("\n".join([*lines, ""]))
    print("\n".join(lines[6:]))
    return 0 if good else 1


def spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f})"


def write_run(run: Path, records: int) -> int:
    """Write a run of so many steps, each recorded; return the bytes of its records."""
    run.mkdir()
    per_epoch = records // EPOCHS
    start = {"event": "start", "format": 1, "time": 0.0, "recipe": "toy", "run_dir": str(run)}
    start |= {"world_size": 1, "num_samples": per_epoch * 32, "global_batch_size": 32}
    start |= {"steps_per_epoch": per_epoch, "epochs": EPOCHS, "resumed": False, "notes": []}
    phases = {"data": 0.1, "forward": 0.3, "backward": 0.4, "optimizer": 0.1, "other": 0.1}
    draw = random.Random(1).random
    with (run / "events.jsonl").open("w") as file:
        file.write(json.dumps(start) + "\n")
        for step in range(1, records + 1):
            loss, epoch = 2 * math.exp(-3 * step / records), 1 + (step - 1) // per_epoch
            record = {"event": "step", "step": step, "epoch": epoch, "loss": loss + 0.3 * draw()}
            record |= {"grad_norm": 1 + draw(), "lr": 0.001 * (1 - step / records)}
            record |= {"samples": 32 * step, "seconds": step / 1000}
            file.write(json.dumps({**record, "samples_per_s": 32_000 + 1000 * draw()}) + "\n")
            if step % per_epoch == 0:
                at = {"epoch": epoch, "step": step, "loss": loss}
                size = {"samples": per_epoch * 32, "train_seconds": per_epoch / 1000}
                file.write(json.dumps({"event": "epoch", **at, **size, "phases": phases}) + "\n")
                found = {"split": "validation", "accuracy": 1 - loss / 2, "seconds": 0.1}
                file.write(json.dumps({"event": "evaluation", **at, **found}) + "\n")
    (run / "settings.toml").write_text('recipe = "toy"\n')
    return (run / "events.jsonl").stat().st_size


def seconds_of_making(run: Path) -> float:
    command = [sys.executable, "-m", "samestep", "report", str(run)]
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def seconds_of_opening(chromium: str, page: Path) -> float:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [chromium, *CHROMIUM, f"--user-data-dir={profile}", "--dump-dom", page.as_uri()]
        began = time.perf_counter()
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        seconds = time.perf_counter() - began
    if page.name != "empty.html":
        assert "<canvas" in done.stdout, "the charts are drawn"
    return seconds


if __name__ == "__main__":
    raise SystemExit(main())
