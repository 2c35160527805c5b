"""Check training scripts, and measure what being watched costs them.

    python benchmarks/check.py FOLDER [NAME ...] [--python PYTHON] [--cost]

FOLDER/NAME/ holds a copy of somebody's script and `cmd.txt`: its arguments in the first line,
`launch: torchrun` or `launch: python` in the second, its name in the third if that is not train.py.
FOLDER/origins.json says where each is from. Each is checked as a user would check it. With --cost
it is also run to its end on the same ranks, by itself and then under watch, with no epoch cut
short, and the two times are compared. Writes `results/check.md`.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from report import machine

KEPT = Path(__file__).parent / "results" / "check.json"
RANKS, TIMEOUT_S = 2, 600
WHOLE = ("--steps", "1000000", "--seconds", str(TIMEOUT_S))
NOTES = """\
Verdict: what `samestep check` said, as (code, severity); "could not be checked" is exit code 2.
Seconds: the whole check, start of Python and PyTorch included. Cost: the wall time of the script
under watch over that of the script alone, on the same two ranks, with all of its steps.
"""


def main() -> None:
    """Check the scripts, one after the other, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--python", default=sys.executable, help="which has what the scripts need")
    parser.add_argument("--cost", action="store_true")
    given = parser.parse_args()
    found: dict[str, Any] = json.loads(KEPT.read_text()) if KEPT.exists() else {"scripts": {}}
    places = sorted(path.parent for path in given.folder.glob("*/cmd.txt"))
    for place in places:
        if not given.names or place.name in given.names:
            one = found["scripts"].setdefault(place.name, {})
            one |= checked(place, given.python)
            if given.cost:
                one |= cost(place, given.python)
            one["origin"] = origin(given.folder, place.name)
            print(place.name, one["verdict"], f"{one['seconds']:.1f} s", one.get("cost", ""))
            found["machine"] = machine()
            KEPT.write_text(json.dumps(found, indent=1) + "\n")
            KEPT.with_suffix(".md").write_text(page(found))


class _Raw(argparse.RawDescriptionHelpFormatter):
    """Keep the lines of this file's description."""


def checked(place: Path, python: str) -> dict[str, Any]:
    """Return what `samestep check` says of a script, and how long it took."""
    began = time.perf_counter()
    done = _samestep_check(place, python)
    seconds = time.perf_counter() - began
    if done.returncode not in (0, 1):
        lines = done.stderr.strip().splitlines() or ["no message"]
        return {"verdict": f"could not be checked: {lines[-1]}", "seconds": seconds, "steps": 0}
    said = json.loads(done.stdout)
    codes = sorted({f"{one['code']} ({one['severity']})" for one in said["findings"]})
    verdict = ", ".join(codes) or "nothing found"
    return {"verdict": verdict, "seconds": seconds, "steps": said["steps"]}


def cost(place: Path, python: str) -> dict[str, Any]:
    """Return the seconds of a script to its end, alone and under watch, and their ratio."""
    script, words, launch = _command(place)
    start = [python]
    if launch == "torchrun":
        start += ["-m", "torch.distributed.run", f"--nproc_per_node={RANKS}"]
        start += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--local-addr=127.0.0.1"]
    times = []
    with tempfile.TemporaryDirectory() as copy:  # what it writes would be found by the next run
        shutil.copytree(place, copy, dirs_exist_ok=True)
        began = time.perf_counter()
        subprocess.run(
            [*start, script, *words],
            cwd=copy,
            env=_environment(),
            capture_output=True,
            check=True,
            timeout=TIMEOUT_S,
        )
        times.append(time.perf_counter() - began)
    began = time.perf_counter()
    done = _samestep_check(place, python, *WHOLE)
    times.append(time.perf_counter() - began)
    if done.returncode not in (0, 1):
        return {}
    return {"alone": times[0], "watched": times[1], "cost": times[1] / times[0]}


def origin(folder: Path, name: str) -> str:
    """Return where a script is from."""
    path = folder / "origins.json"
    return str(json.loads(path.read_text()).get(name, "")) if path.exists() else ""


def page(found: dict[str, Any]) -> str:
    """Return the table as Markdown."""
    facts = ", ".join(f"{key} {value}" for key, value in found["machine"].items())
    lines = [
        "# `samestep check` on public scripts",
        "",
        "    python benchmarks/check.py FOLDER --cost",
    ]
    lines += ["", f"{facts}.", "", NOTES]
    lines += [
        "| script | from | verdict | steps | seconds | cost |",
        "|---|---|---|---:|---:|---:|",
    ]
    for name, one in sorted(found["scripts"].items()):
        times = f"{one['cost']:.2f}" if "cost" in one else ""
        cells = (
            name,
            one["origin"],
            one["verdict"],
            str(one["steps"]),
            f"{one['seconds']:.0f}",
            times,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _command(place: Path) -> tuple[str, list[str], str]:
    """Return a script's name, its arguments and how it is launched."""
    lines = [*(place / "cmd.txt").read_text().splitlines(), "", ""]
    words, launch, script = lines[:3]
    return script or "train.py", shlex.split(words), launch.removeprefix("launch: ") or "torchrun"


def _samestep_check(place: Path, python: str, *flags: str) -> subprocess.CompletedProcess[str]:
    script, words, _ = _command(place)
    return subprocess.run(
        [python, "-m", "samestep", "check", script, "--json", *flags, "--", *words],
        cwd=place,
        env=_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


if __name__ == "__main__":
    main()
