"""Let one rank of a real training hang in each of many ways; is it named, by rank and line?

    python benchmarks/stalls.py [NAME ...] [--cost]

Each case runs as a user would run it, on two ranks. A case counts as named if the verdict has the
rank and the line of the culprit. With --cost the time of a step is measured, watched and not
watched in turn. Writes `results/stalls.md`.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import machine

from samestep.ranks.watched import STALLED
from samestep.slurm.script import START

HERE = Path(__file__).parent
KEPT = HERE / "results" / "stalls.json"
RECIPE, SCRIPT = HERE / "stalled" / "recipe.py", HERE / "stalled" / "script.py"
WITHIN_S = 10.0
ROUNDS, STEPS = 7, 3000
NOTES = """\
Stall time: after how long without a sign of life the ranks count as hung, by `--stall-s` 3, or 1
where what the ranks do may take 30 times as long. Late: seconds from the hang to the verdict, less
the stall time; a case passes if it is named and no later than 10 s.
"""


@dataclass(frozen=True)
class Case:
    """One way to hang."""

    how: str
    what: str
    mark: str = "sleeps, worker, start, end, evaluation"
    """The comment at the line that has to be named."""
    culprit: int = 1
    stall_s: float = 3.0
    times: float = 1.0
    script: bool = False


CASES = {
    "sleeps": Case("sleeps", "sleeps"),
    "spins": Case("spins", "spins in Python", "spins"),
    "spins-in-c": Case("spins_in_c", "spins in C with the GIL", "spins_in_c"),
    "stopped": Case("stopped", "is stopped by SIGSTOP", ""),
    "worker": Case("worker", "waits for a loader worker that hangs"),
    "different": Case("different", "calls another collective", "different", script=True),
    "shapes": Case("shapes", "brings another shape", "shapes", script=True),
    "left": Case("left", "left the loop early", "left", script=True),
    "locked": Case("locked", "waits for a lock that it holds", "locked"),
    "fifo": Case("fifo", "reads from a file system that blocks (FIFO)", "fifo"),
    "rank-0": Case("sleeps", "rank 0 itself sleeps", culprit=0),
    "start": Case("start", "hangs at the start, before the ranks meet", stall_s=1, times=30),
    "end": Case("end", "hangs at the end, after the others have left", stall_s=1, times=30),
    "evaluation": Case("evaluation", "hangs in the evaluation", stall_s=1, times=10),
    "script": Case("sleeps", "sleeps in a plain script", "script_sleeps", script=True),
}


def main() -> None:
    """Run the cases, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--cost", action="store_true")
    given = parser.parse_args()
    found: dict[str, Any] = json.loads(KEPT.read_text()) if KEPT.exists() else {"cases": {}}
    for name in given.names or ([] if given.cost else CASES):
        with tempfile.TemporaryDirectory() as folder:
            found["cases"][name] = hung(CASES[name], Path(folder))
        print(name, found["cases"][name], flush=True)
    if given.cost:
        found["cost"] = cost()
    found["machine"] = machine()
    KEPT.write_text(json.dumps(found, indent=1) + "\n")
    KEPT.with_suffix(".md").write_text(page(found))


class _Raw(argparse.RawDescriptionHelpFormatter):
    """Keep the lines of this file's description."""


def hung(case: Case, folder: Path) -> dict[str, Any]:
    """Run a case; return whether it was named, how late, and the verdict."""
    run, file = folder / "run", SCRIPT if case.script else RECIPE
    run.mkdir()
    more = {"HOW": case.how, "CULPRIT": str(case.culprit), "HUNG": str(folder / "hung")}
    if case.script:
        (run / ".start.py").write_text(START)
        words = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=29511"]
        words += [str(run / ".start.py"), str(file)]
        more |= {"SAMESTEP_RUN_DIR": str(run), "SAMESTEP_STALL_S": str(case.stall_s)}
    else:
        words = ["-m", "samestep", "train", str(file), "--nproc", "2", "--run-dir", str(run)]
        words += ["--stall-s", str(case.stall_s), "--num-workers", "2" * (case.how == "worker")]
        words = words if case.how == "worker" else words[:-2]
    done = subprocess.run(
        [sys.executable, *words],
        env=os.environ | more,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    ended = time.time()
    result = run / "result.json"
    told = json.loads(result.read_text()) if result.exists() else {}
    is_told = "stall" in told
    said = told["reason"] if is_told else done.stderr.strip().splitlines()[-1]
    began = float((folder / "hung").read_text())
    late_s = (result.stat().st_mtime if is_told else ended) - began - case.stall_s * case.times
    lines = file.read_text().splitlines()
    line = next((n for n, text in enumerate(lines, 1) if text.endswith(f"# {case.mark}")), 0)
    place = f"{file.name}:{line}" if case.mark else "is stopped by a signal"
    named = f"rank {case.culprit} " in said and place in said
    is_own = told.get("exit_code") == STALLED or done.returncode == STALLED
    said = re.sub(r"/\S*/", "", said.removeprefix("failed: ").removeprefix("samestep: "))
    return {"named": named and is_own, "late_s": late_s, "said": said}


def cost() -> dict[str, float]:
    """Return the milliseconds of a step of spiral on two ranks, watched and not."""
    found: dict[str, list[float]] = {"watched": [], "not watched": []}
    for number in range(2 * ROUNDS):
        name = ["watched", "not watched", "not watched", "watched"][number % 4]
        with tempfile.TemporaryDirectory() as folder:
            words = ["train", "spiral", "--nproc", "2", "--max-steps", str(STEPS)]
            words += ["--run-dir", folder, "--no-pictures", "--eval-every-epochs", "1000"]
            words += ["--checkpoint-every-epochs", "1000", "--epochs", "100000"]
            words += ["--stall-s", "0"] if name == "not watched" else []
            subprocess.run(
                [sys.executable, "-m", "samestep", *words], check=True, capture_output=True
            )
            seconds = json.loads(Path(folder, "result.json").read_text())["training_seconds"]
        found[name].append(1000 * seconds / STEPS)
        print(name, f"{found[name][-1]:.4f} ms", flush=True)
    return {name: statistics.median(times) for name, times in found.items()}


def page(found: dict[str, Any]) -> str:
    """Return the table as a page."""
    cases = {name: found["cases"][name] for name in CASES if name in found["cases"]}
    good = sum(case["named"] and case["late_s"] <= WITHIN_S for case in cases.values())
    rows = [
        f"| {CASES[name].what} | {'yes' if case['named'] else 'no'} "
        f"| {CASES[name].stall_s * CASES[name].times:.0f} s | {case['late_s']:.1f} s "
        f"| {case['said'].replace('|', ' ')} |"
        for name, case in cases.items()
    ]
    cost = ""
    if "cost" in found:
        on, off = found["cost"]["watched"], found["cost"]["not watched"]
        cost = (
            f"\nA step of spiral on two ranks: {on:.4f} ms watched, {off:.4f} ms not "
            f"({(on / off - 1):+.1%}; medians of {ROUNDS} runs of {STEPS:,} steps each, in turn).\n"
        )
    head = ["| one rank … | named | stall time | late | verdict |", "|---|---|---|---|---|"]
    title = f"# Planted stalls\n\n{found['machine']}. {good} of {len(cases)} pass.\n\n{NOTES}"
    return "\n".join([title, *head, *rows, cost])


if __name__ == "__main__":
    main()
