"""Turn measurements into ratios, and ratios into a Markdown table."""

import importlib.metadata
import math
import os
import platform
import statistics
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from measure import Measurement
from tables import Table, Target

Rounds = dict[str, list[Measurement]]
"""The measurements of each row, one a round; a row that failed is not in it."""


def heading(title: str, facts: dict[str, str]) -> list[str]:
    """Return the first lines of a page: its title, the command of this process, the machine."""
    script = f"benchmarks/{Path(sys.argv[0]).name}"
    told = ", ".join(f"{name} {value}" for name, value in facts.items())
    command = " ".join(["python", script, *sys.argv[1:]])
    return [f"# {title}", "", f"    {command}", "", f"{told}.", ""]


def machine() -> dict[str, str]:
    """Say on what, with what, and when this was measured."""
    cpu_lines = Path("/proc/cpuinfo").read_text().splitlines() if _has_cpuinfo() else []
    models = [line.partition(":")[2].strip() for line in cpu_lines if line.startswith("model name")]
    packages = ("torch", "accelerate", "lightning", "numpy", "pillow", "samestep")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": models[0] if models else platform.processor(),
        "cores": str(len(os.sched_getaffinity(0)) if models else os.cpu_count()),
        "system": platform.platform(),
        "load before": f"{os.getloadavg()[0]:.1f}",
        "commit": _commit(),
        "Python": platform.python_version(),
        **{package: _version(package) for package in packages},
    }


def baseline_of(table: Table, rounds: Rounds) -> str | None:
    """Choose the baseline: of the rows that may be it, the one with the highest median."""
    measured = [name for name in table.baseline if name in rounds]
    return max(measured, key=lambda name: _median(rounds[name]), default=None)


def ratios(rounds: Rounds, row: str, against: str) -> list[float]:
    """Divide round by round: what ran beside each other is compared with each other."""
    pairs = zip(rounds[row], rounds[against], strict=True)
    return [mine["value"] / other["value"] for mine, other in pairs]


def judge(target: Target, rounds: Rounds, baseline: str | None) -> tuple[bool, str]:
    """Say whether a target is reached, and by how much."""
    against = target.against or baseline
    if against not in rounds or target.row not in rounds:
        return False, f"{target.row}: not measured"
    if target.kind == "at most more":
        pairs = zip(rounds[target.row], rounds[against], strict=True)
        numbers, sign = [mine["value"] - other["value"] for mine, other in pairs], "s more than"
    else:
        numbers, sign = ratios(rounds, target.row, against), "x"
    median = statistics.median(numbers)
    reached = median >= target.limit if target.kind == "at least" else median <= target.limit
    bound = "≥" if target.kind == "at least" else "≤"
    verdict = "reached" if reached else "NOT REACHED"
    wanted = f"{target.row} {bound} {target.limit:g} {sign} {against}"
    return reached, f"{wanted}: {_spread(numbers)}, {verdict}"


def markdown(
    table: Table, rounds: Rounds, failures: dict[str, str], facts: dict[str, str], command: str
) -> str:
    """Write the page of one table."""
    baseline = baseline_of(table, rounds)
    lines = [f"# {table.title}", "", f"    {command}", ""]
    lines += [", ".join(f"{key} {value}" for key, value in facts.items()) + ".", ""]
    throughput = table.unit == "samples/s"
    extra = [" first epoch, s | threads per process |", "---:|---:|"] if throughput else ["", ""]
    lines += [f"| | {table.unit} | ratio (min-max) |{extra[0]}", f"|---|---:|---:|{extra[1]}"]
    for row in table.rows:
        if row.name in failures:
            lines.append(f"| {row.name} | failed: {failures[row.name]} | |{' | |' * throughput}")
        elif row.name in rounds:
            lines.append(_line(row.name, rounds, baseline, throughput=throughput))
    lines += [""]
    lines += [f"- Target: {judge(target, rounds, baseline)[1]}." for target in table.targets]
    lines += [f"- {sentence}" for sentence in _compile_times(rounds)]
    lines += [f"- {sentence}" for sentence in (*table.facts(), *table.notes)]
    count = max((len(found) for found in rounds.values()), default=0)
    lines.append(
        f"- {count} rounds, every row a fresh process, rows interleaved; a ratio is the median of "
        f"the rounds' ratios to {baseline or 'a baseline that failed'} in the same round."
    )
    if throughput:
        lines.append(
            "- Throughput is that of the median epoch after one epoch of warm-up, training only: "
            "no evaluation, no checkpoint. The peers log nothing unless the row says so."
        )
    return "\n".join(lines) + "\n"


def _line(name: str, rounds: Rounds, baseline: str | None, *, throughput: bool) -> str:
    value = _median(rounds[name])
    shown = f"{value:,.0f}" if throughput else f"{value:.3f}"
    ratio = _spread(ratios(rounds, name, baseline)) if baseline else ""
    line = f"| {name} | {shown} | {ratio} |"
    if throughput:
        first = rounds[name][0]
        line += f" {first['first_epoch_s']:.2f} | {first['threads']} |"
    return line


def _compile_times(rounds: Rounds) -> list[str]:
    """Say what compiling costs, cold and from torch's cache, and after how many epochs it pays."""
    sentences = []
    for name, measured in rounds.items():
        slower = name.removesuffix(", compile on")
        if slower == name or slower not in rounds or "compile_s" not in measured[0]:
            continue
        samples = measured[0]["samples"]
        saved = samples / _median(rounds[slower]) - samples / _median(measured)
        cold, warm = measured[0]["compile_s"], [one["compile_s"] for one in measured[1:]]
        times = {"cold": cold} | ({"from torch's cache": statistics.median(warm)} if warm else {})
        for how, seconds in times.items():
            pays = (
                f"pays after {math.ceil(seconds / saved):,} epochs" if saved > 0 else "never pays"
            )
            sentences.append(f"{name}: compiling takes {seconds:.1f} s ({how}), {pays}.")
    return sentences


def _median(measured: list[Measurement]) -> float:
    return float(statistics.median(one["value"] for one in measured))


def _spread(numbers: list[float]) -> str:
    return f"{statistics.median(numbers):.2f} ({min(numbers):.2f}-{max(numbers):.2f})"


def _has_cpuinfo() -> bool:
    return Path("/proc/cpuinfo").exists()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    here = Path(__file__).parent
    asked = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=here,
        capture_output=True,
        text=True,
        check=False,
    )
    return asked.stdout.strip() or "unknown"
