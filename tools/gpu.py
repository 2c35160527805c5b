"""Check or measure samestep on this machine's GPU; tools/gpu.sh starts it. It needs no network.

With --dry the same runs on the CPU with tiny sizes and installs nothing. Both commands write one
JSON file and one table into $OUT, else into build/gpu/.
"""

import argparse
import datetime as dt
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu_data import unpack
from gpu_probe import probe
from gpu_report import NOT_ENDED, REPORT, counts, read_notes, table

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "gpu"
LIMIT_S = 210
"""Of the tests on a GPU: with what is installed and unpacked before, below 4 minutes."""
PART_LIMIT_S = 150
"""Of a part of the benchmarks, which starts nothing that would last longer than 140 s."""
TEST_LIMIT_S = 90
WORKERS = 8
DATA, DRY = "SAMESTEP_GPU_DATA", "SAMESTEP_GPU_DRY"
"""What tests/gpu and the benchmarks find the kit's data by; and that no GPU is meant."""


def main() -> int:
    """Run the command; 0 if all is well, 1 if something failed, 2 for a mistake in the command."""
    parser = argparse.ArgumentParser(prog="tools/gpu.sh", description=__doc__)
    parser.add_argument("command", choices=["check", "bench"])
    parser.add_argument("part", nargs="?", help="bench: which part; by default all of them")
    parser.add_argument("--dry", action="store_true", help="on the CPU, with tiny sizes")
    parser.add_argument("-k", metavar="EXPRESSION", help="check: only the tests that match")
    asked = parser.parse_args()
    if asked.part and asked.command == "check":
        parser.error(f"check has no parts: {asked.part!r}. Name tests with -k.")
    if asked.k and asked.command == "bench":
        parser.error("bench runs no tests: leave -k out.")
    machine = probe()
    if not asked.dry and not machine["devices"]:
        parser.error(
            f"there is no CUDA device here (torch {machine['torch']}). Start it on a machine with "
            "a GPU, or add --dry."
        )
    out = Path(os.environ.get("OUT") or BUILD).resolve()
    out.mkdir(parents=True, exist_ok=True)
    environment = make_environment(dry=asked.dry)
    if asked.command == "bench":
        return _bench(asked.part, out, environment, dry=asked.dry)
    return _check(asked.k, out, environment, machine, dry=asked.dry)


def make_environment(*, dry: bool) -> dict[str, str]:
    """Return the environment of what is started: the code, wheels and data of the kit."""
    paths = [str(ROOT / "src"), str(ROOT)]
    more = {DRY: "1", "CUDA_VISIBLE_DEVICES": ""} if dry else {}
    kit = next((k for k in (ROOT / ".gpu-kit", ROOT.parent) if (k / "kit.json").is_file()), None)
    if kit is not None and not dry:
        paths.insert(0, str(_install(kit / "wheels")))
        if unpack(kit / "data", BUILD / "data"):
            more[DATA] = str(BUILD / "data")
    inherited = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        **more,
        "PYTHONPATH": os.pathsep.join([*paths, *([inherited] if inherited else [])]),
        "PYTHONUNBUFFERED": "1",
        "NO_COLOR": "1",
    }


def _install(wheels: Path) -> Path:
    """Install the kit's wheels into a folder of their own, once; return the folder."""
    site, mark = BUILD / "site", BUILD / "site" / "installed.txt"
    files = sorted(wheels.glob("*.whl"))
    names = "\n".join(file.name for file in files)
    if not mark.exists() or mark.read_text() != names:
        site.mkdir(parents=True, exist_ok=True)
        if files:
            subprocess.run(
                [
                    *(sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"),
                    *("--no-compile", "--upgrade", "--target", str(site), *map(str, files)),
                ],
                check=True,
            )
        mark.write_text(names)
    return site


def _check(
    only: str | None, out: Path, environment: dict[str, str], machine: dict[str, Any], *, dry: bool
) -> int:
    notes = out / "check.jsonl"
    notes.unlink(missing_ok=True)
    # Other versions warn of other things; here that is no failure.
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu", "-p", "gpu_report"]
    command += ["-W", "default", "-p", "no:cacheprovider", f"--timeout={TEST_LIMIT_S}", "-q"]
    command += ["-k", only] if only else []
    # Dry, the tests are few: one process starts once.
    command += [f"--numprocesses={0 if dry else WORKERS}", "--dist=loadgroup"]
    began = time.monotonic()
    paths = os.pathsep.join([environment["PYTHONPATH"], str(ROOT / "tools")])  # the plugin's
    limit_s = None if dry else LIMIT_S  # a CPU may be as slow as it is; each test has its limit
    code = run_limited(command, {**environment, "PYTHONPATH": paths, REPORT: str(notes)}, limit_s)
    if code is None:
        sys.stderr.write(f"gpu.sh: check was cut off at {limit_s} s.\n")
    rows = read_notes(notes)
    record: dict[str, Any] = {
        "command": " ".join(["bash", "tools/gpu.sh", *sys.argv[1:]]),
        "dry": dry,
        "when": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "machine": {key: value for key, value in machine.items() if key != "packages"},
        "seconds": round(time.monotonic() - began, 1),
        "limit_s": limit_s,
        "cut_off": code is None,
        "exit_code": code,
        "counts": counts(rows),
        "tests": rows,
    }
    (out / "check.json").write_text(json.dumps(record, indent=1) + "\n")
    (out / "check.md").write_text(table(record))
    notes.unlink(missing_ok=True)
    print(f"\n{out / 'check.md'}, check.json: {record['counts']}")
    return int(code != 0 or not record["counts"]["passed"] or bool(record["counts"][NOT_ENDED]))


def _bench(part: str | None, out: Path, environment: dict[str, str], *, dry: bool) -> int:
    command = [sys.executable, "benchmarks/gpu.py", *([part] if part else [])]
    command += [*(["--dry"] if dry else []), "--out", str(out)]
    code = run_limited(command, environment, PART_LIMIT_S if part else None)
    if code is None:
        sys.stderr.write(f"gpu.sh: bench {part} was cut off at {PART_LIMIT_S} s.\n")
    return 1 if code is None else code


def run_limited(
    command: list[str], environment: dict[str, str], limit_s: float | None
) -> int | None:
    """Run a command at the root; return its exit code, or None if it was ended at its limit."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # with the ranks and workers that it started
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
