"""Kill trainings at random points, resume them, and count what was lost.

    python benchmarks/kills.py [--kills 300] [--seed 20261121]

Runs the crash test with that many SIGKILLs and writes `benchmarks/results/kills.md`. The test
fails, and so does this, when an announced checkpoint is missing or damaged, or when a run does not
end where the uninterrupted one ended.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from report import heading, machine

ROOT = Path(__file__).parent.parent
PAGE = Path(__file__).parent / "results" / "kills.md"
TEST = "tests/training/test_crashes.py::test_many_kills_in_a_row_at_random_points_still_arrive"


def main() -> int:
    """Run the test, write the page, and return the test's exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", default="20261121")
    asked = parser.parse_args()
    more = {"SAMESTEP_TEST_KILLS": str(asked.kills), "SAMESTEP_TEST_SEED": asked.seed}
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-s", "-q", "-p", "no:cacheprovider", TEST],
        cwd=ROOT,
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.findall(r"kill \d+, ([^,]+), visit \d+, (.*) at world size (\d)", done.stdout)
    points = Counter(re.sub(r": \d+$", "", point) for point, _, _ in found)
    sizes = Counter(size for _, _, size in found)
    ways = Counter(way for _, way, _ in found)
    minutes = (time.perf_counter() - began) / 60
    verdict = "FAILED" if done.returncode else "passed: nothing was lost"
    lines = [
        *heading("Kills: what is lost when a training is killed again and again", machine()),
        f"{len(found)} SIGKILLs in {minutes:.0f} minutes; the test {verdict}.",
        "",
        "| at | kills |",
        "|---|---:|",
        *(f"| {point} | {count} |" for point, count in sorted(points.items())),
        *(f"| world size {size} | {count} |" for size, count in sorted(sizes.items())),
        *(f"| {way} | {count} |" for way, count in sorted(ways.items())),
    ]
    PAGE.write_text("\n".join([*lines, ""]))
    print("\n".join(lines))
    if done.returncode:
        print(done.stdout[-4000:], done.stderr[-2000:])
    return done.returncode


if __name__ == "__main__":
    raise SystemExit(main())
