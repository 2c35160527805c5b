"""Let one rank of a real training hang in each of many ways; is it named, by rank and line?

    python benchmarks/stalls.py [NAME ...] [--cost]

Each case runs as a user would run it, on two ranks. A case counts as named if the verdict has the
rank and the line of the culprit. With --cost the time of a step is measured, watched and not
watched in turn. Writes `results/stalls.md`.
"""

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from report import machine

import samestep
from samestep.cluster.slurm.script import START
from samestep.launch.ranks import watched
from samestep.launch.ranks.watched import STALLED

HERE = Path(__file__).parent
KEPT = HERE / "results" / "stalls.json"
RECIPE, SCRIPT = HERE / "stalled" / "recipe.py", HERE / "stalled" / "script.py"
WITHIN_S = 10.0
BLOCK, STEPS = 2, 100_000
NOTES = """\
Stall time: after how long without a sign of life the ranks count as hung, by `--stall-s` 3, or 1
where what the ranks do may take 30 times as long. Late: seconds from the hang to the verdict, less
the stall time; a case passes if it is named and no later than 10 s. Where ranks bring different
shapes, Gloo may raise or abort instead of waiting: then that error ends the job, and
its verdict says which calls did not meet.
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
    raises: bool = False
    """Whether Gloo may raise instead of waiting: then the error has to name the line."""


CASES = {
    "sleeps": Case("sleeps", "sleeps"),
    "spins": Case("spins", "spins in Python", "spins"),
    "spins-in-c": Case("spins_in_c", "spins in C with the GIL", "spins_in_c"),
    "stopped": Case("stopped", "is stopped by SIGSTOP", "stopped"),
    "worker": Case("worker", "waits for a loader worker that hangs"),
    "different": Case("different", "calls another collective", "different", script=True),
    "shapes": Case("shapes", "brings another shape", "shapes", script=True, raises=True),
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
    errors = done.stderr.strip().splitlines()
    failures = [json.loads(path.read_text()) for path in run.glob(".failure-rank-*.json")]
    said = told["reason"] if is_told else failures[0]["message"] if failures else errors[-1]
    began = float((folder / "hung").read_text())
    late_s = (result.stat().st_mtime if is_told else ended) - began - case.stall_s * case.times
    lines = file.read_text().splitlines()
    line = next((n for n, text in enumerate(lines, 1) if text.endswith(f"# {case.mark}")), 0)
    place = f"{file.name}:{line}"
    named = f"rank {case.culprit} " in said and place in said
    is_own = STALLED in (told.get("exit_code"), done.returncode) or case.raises
    said = re.sub(r"/\S*/", "", said.removeprefix("failed: ").removeprefix("samestep: "))
    return {"named": named and is_own, "late_s": late_s, "said": said}


def cost() -> dict[str, float]:
    """Return the microseconds of a step of spiral, watched and not in turn, in one training.

    One rank alone has the shortest steps. The processor's time is counted: the clock's would tell
    what else the machine does. `watcher` is the share of a core that the watcher takes.
    """
    blocks: dict[bool, list[float]] = {True: [], False: []}
    is_on, taken, since, used = True, 0, time.thread_time(), [0.0]
    note, chance = watched.step, random.Random(0)

    def step(number: int) -> None:
        nonlocal is_on, taken, since
        if is_on:
            note(number)
        taken += 1
        if taken % BLOCK == 0:
            now = time.thread_time()
            blocks[is_on].append(1e6 * (now - since) / BLOCK)
            is_pair = len(blocks[True]) == len(blocks[False])
            is_on, since = chance.random() < 0.5 if is_pair else not is_on, now
        if taken == STEPS - 1:
            used.extend(sum(c.cpu_times()[:2]) for c in psutil.Process().children())

    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        watched.step = step
        settings = {"epochs": 10**6, "max_steps": STEPS, "eval_every_epochs": 10**6}
        more = {"checkpoint_every_epochs": 10**6, "pictures": False, "stall_s": 60}
        samestep.train("spiral", run_dir=f"{folder}/run", quiet=True, **settings, **more)
    on, off = (statistics.median(blocks[is_on]) for is_on in (True, False))
    pairs = zip(blocks[True], blocks[False], strict=False)
    more_us = statistics.median(a - b for a, b in pairs)
    seconds = time.monotonic() - begin
    return {"watched": on, "not watched": off, "more": more_us, "watcher": max(used) / seconds}


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
        times = found["cost"]
        off = times["not watched"]
        more = f"{times['more']:.2f} µs ({times['more'] / off:.2%})"
        on = f"{times['watched']:.1f} µs of the processor watched, {off:.1f} µs not"
        cost = (
            f"\nA step of spiral on one rank takes {on}, in turn every {BLOCK} steps; "
            f"the median difference is {more}. The watcher takes {times['watcher']:.2%} of a core, "
            "its start included.\n"
        )
    head = ["| one rank … | named | stall time | late | verdict |", "|---|---|---|---|---|"]
    where = ", ".join(found["machine"][name] for name in ("date", "cpu", "system", "torch"))
    title = f"# Planted stalls\n\n{where}. {good} of {len(cases)} pass.\n\n{NOTES}"
    return "\n".join([title, *head, *rows, cost])


if __name__ == "__main__":
    main()
