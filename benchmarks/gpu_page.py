"""Turn the JSON files of the GPU's benchmark into one page."""

import json
import statistics
from pathlib import Path
from typing import Any

from gpu_parts import ACCURACY, AIM_S, IDLE_LIMIT, SEEDS, Part, all_parts
from report import Rounds, baseline_of, judge, ratios
from tables import Table

# Multiplications and additions of ResNet-18 at 32 x 32, 0.556e9 each an image; forward, and twice
# that for backward; 49,000 images in each of 35 epochs: examples/cifar10_fast.toml.
PFLOP = 0.556e9 * 2 * 3 * 49_000 * 35 / 1e15
AIRBENCH = (
    "airbench (Keller Jordan) is far ahead. Its page, github.com/KellerJordan/cifar10-airbench, "
    "gives 2.59 s and 0.29 PFLOP for `airbench94_muon.py`, 94.01 % on average, on one A100; its "
    'paper, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU" (2024, arXiv:2404.00498), 3.29 s. '
    "Those are its author's numbers, means over many runs, on another device: no row here. The "
    f"reasons: ResNet-18 for 35 epochs is about {PFLOP:.1f} PFLOP, some twenty times as many. "
    "airbench trains a much smaller network for 8 epochs, and all of it was made for this one "
    "number: a first layer that whitens, taken from the data; Muon in place of SGD; label "
    "smoothing; flips that alternate by epoch; a test on several views of each image. The run "
    "here is an ordinary recipe with settings that anyone can give, and its test looks at each "
    "image once."
)
HOW = (
    "Rows of a table take turns, each a fresh process, every other round in reverse; a ratio is "
    "the median of the rounds' ratios in the same round. Throughput is that of the fastest epoch "
    "after one that warms up and compiles, training only; the clock is read when the device has "
    "done all its work. GPU idle: the share of a step in which no kernel runs, the kernels' time "
    "from a trace, the step's without the profiler."
)
TO_ACCURACY = (
    "From the first step to the end of the evaluation on the test set after the last epoch: "
    "training, every evaluation and that one. Compiling and writing the checkpoint are not in it."
)


def page(folder: Path, out: Path) -> int:
    """Write gpu.md into a directory from the files of a folder; return 2 if that is refused."""
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    by_name = {record["part"]: record for record in records if "part" in record}
    if not by_name:
        print(f"{folder} holds no JSON file of benchmarks/gpu.py. Measure first.")
        return 2
    dry = any(record["dry"] for record in by_name.values())
    if dry and (Path(__file__).parent / "results").resolve() == out.resolve():
        print(f"{folder} comes from --dry, and nothing of it means anything: name another --out.")
        return 2
    lines = ["# On a GPU", ""]
    if dry:
        lines += ["**Dry: tiny sizes on a CPU. No number here means anything.**", ""]
    for name, part in all_parts(dry=dry).items():
        if name in by_name:
            lines += _part(part, by_name[name])
    lines += [HOW, ""]
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu.md").write_text("\n".join(lines), encoding="utf-8")
    print(f"wrote {out / 'gpu.md'}")
    return 0


def _part(part: Part, record: dict[str, Any]) -> list[str]:
    facts = ", ".join(f"{key} {value}" for key, value in record["machine"].items())
    data = ", ".join(f"{key}: {value}" for key, value in record.get("data", {}).items())
    lines = [f"## {part.name}: {record['machine']['device']}", "", f"    {record['command']}", ""]
    lines += [f"{facts}. Data: {data}.", ""]
    if "skipped" in record:
        return [*lines, f"Skipped: {record['skipped']}.", ""]
    for table in part.tables:
        if table.name in record["tables"]:
            found = record["tables"][table.name]
            make = _to_accuracy if part.needs_cifar10 else _table
            lines += make(table, found["rounds"], found["failed"])
    return lines + _profiles(part, record["profiles"])


def _table(table: Table, rounds: Rounds, failed: dict[str, str]) -> list[str]:
    # Where time ran out within a round, that round is left out.
    count = min((len(found) for found in rounds.values()), default=0)
    rounds = {name: found[:count] for name, found in rounds.items()}
    baseline = baseline_of(table, rounds)
    throughput = table.unit == "samples/s"
    more = (" first epoch, s | compiling, s |", "---:|---:|") if throughput else ("", "")
    lines = [f"### {table.title}", ""]
    lines += [f"| | {table.unit} | ratio (min-max) |{more[0]}", f"|---|---:|---:|{more[1]}"]
    for row in table.rows:
        if row.name in failed:
            lines.append(f"| {row.name} | {_why(failed[row.name])} | |{' | |' * throughput}")
        elif row.name in rounds:
            measured = rounds[row.name]
            value = statistics.median(one["value"] for one in measured)
            ratio = _spread(ratios(rounds, row.name, baseline)) if baseline else ""
            line = f"| {row.name} | {value:,.{0 if throughput else 3}f} | {ratio} |"
            if throughput:
                first = measured[0]
                compiling = f"{first['compile_s']:.1f}" if "compile_s" in first else ""
                line += f" {first['first_epoch_s']:.2f} | {compiling} |"
            lines.append(line)
        else:
            lines.append(f"| {row.name} | not measured: no time was left | |{' | |' * throughput}")
    lines += ["", *(f"- Target: {judge(one, rounds, baseline)[1]}." for one in table.targets)]
    rounds_told = "1 round." if count == 1 else f"{count} rounds."
    lines += [f"- {note}" for note in (*table.notes, rounds_told)]
    return [*lines, ""]


def _to_accuracy(table: Table, rounds: Rounds, failed: dict[str, str]) -> list[str]:
    """Say for each seed how long it took, and whether it got there."""
    lines = [f"### {table.title}", ""]
    lines += [
        "| | s | test accuracy | compiling, s | whole process, s |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [f"| {row} | {_why(why)} | | | |" for row, why in failed.items()]
    found = {row: measured[0] for row, measured in rounds.items()}
    for row, one in found.items():
        numbers = f"{one['value']:.1f} | {one['accuracy']:.4f} | {one['compile_s']:.1f}"
        lines.append(f"| {row} | {numbers} | {one['wall_s']:.1f} |")
    reached = [one["value"] for one in found.values() if one["accuracy"] >= ACCURACY]
    good = len(reached) == len(SEEDS) and max(reached) <= AIM_S
    slowest = f"the slowest took {max(reached):.1f} s, " if reached else ""
    lines += [
        "",
        f"- {len(reached)} of {len(found)} measured seeds reached {ACCURACY:.0%}.",
        f"- Target: all {len(SEEDS)} in at most {AIM_S:.0f} s: {slowest}{_verdict(good=good)}.",
        f"- {TO_ACCURACY}",
        f"- {AIRBENCH}",
    ]
    return [*lines, ""]


def _profiles(part: Part, profiles: dict[str, Any]) -> list[str]:
    if not profiles:
        return []
    lines = ["| `samestep profile` | verdict | its share | step, ms | GPU idle |"]
    lines += ["|---|---|---:|---:|---:|"]
    for name, one in profiles.items():
        if "failed" in one:
            lines.append(f"| {name} | {_why(one['failed'])} | | | |")
        else:
            idle = "" if one["gpu_idle"] is None else f"{one['gpu_idle']:.0%}"
            step = f"{one['value'] * 1000:.3f}"
            lines.append(f"| {name} | {one['kind']} | {one['share']:.0%} | {step} | {idle} |")
    lines.append("")
    for name in part.idle:
        idle = profiles.get(name, {}).get("gpu_idle")
        told = "not measured"
        if idle is not None:
            told = f"{idle:.1%}, {_verdict(good=idle <= IDLE_LIMIT)}"
        lines.append(f"- Target: {name}, GPU idle ≤ {IDLE_LIMIT:.0%}: {told}.")
    lines += [
        f"- {name}: {one['why']} {one['change']}" for name, one in profiles.items() if "why" in one
    ]
    return [*lines, ""]


def _verdict(*, good: bool) -> str:
    return "reached" if good else "NOT REACHED"


def _why(text: str) -> str:
    """Return why a row is missing, for a cell of a table."""
    return (
        text.replace("|", "/")
        if "is not installed" in text
        else f"failed: {text}".replace("|", "/")
    )


def _spread(numbers: list[float]) -> str:
    return f"{statistics.median(numbers):.2f} ({min(numbers):.2f}-{max(numbers):.2f})"
