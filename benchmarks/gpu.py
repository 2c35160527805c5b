"""Measure samestep on a GPU beside its peers: `python benchmarks/gpu.py [PART] [--dry]`.

Each part takes at most 150 s, needs no network, and writes one JSON file, again after every
process, so that what was measured is there if time runs out. `python benchmarks/gpu.py page DIR`
turns the files into `benchmarks/results/gpu.md`. With `--dry` everything is tiny and runs on the
CPU: it tells whether the parts work, and no number of it means anything.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import measure
from gpu_inputs import prepare
from gpu_page import page
from gpu_parts import NO_CIFAR10, Part, all_parts
from measure import FailedError, environment
from report import machine
from run import measure_row, take_turns

RESULTS = Path(__file__).parent / "results"
LIMIT_S = 140.0
"""No process is started that would not end by then, if it takes as long as the longest before."""
PROFILE_S = 30.0
"""What is kept free for each profile."""
PROCESS_S = 120.0
"""A process that takes longer than this has failed."""
_DEVICE = """
import json, torch
properties = torch.cuda.get_device_properties(0)
print(json.dumps({"device": properties.name, "GiB": round(properties.total_memory / 2**30),
"CUDA": torch.version.cuda, "cuDNN": torch.backends.cudnn.version()}))
"""


def main() -> int:
    """Measure the parts asked for, or write the page; return 1 if something failed."""
    asked = _arguments()
    if asked.part == "page":
        return page(asked.folder, asked.out or RESULTS)
    facts = {"device": "cpu"} if asked.dry else _device()
    if facts is None:
        print("PyTorch finds no CUDA GPU here. Add --dry to try the parts on the CPU.", flush=True)
        return 2
    if not asked.dry:  # a busy CPU takes its time
        measure.TIMEOUT_S = PROCESS_S
    parts = all_parts(dry=asked.dry)
    names = list(parts) if asked.part == "all" else [asked.part]
    out = asked.out or (None if asked.dry else RESULTS / "gpu")
    if asked.dry and out is not None and out.resolve().is_relative_to(RESULTS.resolve()):
        print(f"--dry writes nothing into {RESULTS}: no number of it means anything.", flush=True)
        return 2
    # Dry parts share two cores; parts that measure have the machine to themselves.
    with ThreadPoolExecutor(max_workers=2 if asked.dry else 1) as pool:
        told = pool.map(lambda name: measure_part(parts[name], asked, facts, out), names)
        return 0 if all(list(told)) else 1


def _arguments() -> argparse.Namespace:
    parts = list(all_parts(dry=True))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="?", default="all", choices=[*parts, "all", "page"])
    parser.add_argument("folder", nargs="?", type=Path, help="of page: where the JSON files lie")
    parser.add_argument("--dry", action="store_true", help="tiny sizes, on the CPU")
    parser.add_argument(
        "--out",
        type=Path,
        help="directory for the files; default benchmarks/results/gpu, dry: none",
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=Path(os.environ.get("SAMESTEP_GPU_DATA", "data")),
        help="holds cifar10/ (binary) and mnist/ (IDX); default $SAMESTEP_GPU_DATA, or data",
    )
    parser.add_argument("--rounds", type=int, help="in place of the part's own number")
    asked = parser.parse_args()
    if (asked.part == "page") != (asked.folder is not None):
        parser.error("page takes the folder of the JSON files, and no other part takes one")
    return asked


def _device() -> dict[str, Any] | None:
    """Ask a process of its own for the GPU, so that this one holds none of its memory."""
    told = subprocess.run(
        [sys.executable, "-c", _DEVICE], capture_output=True, text=True, check=False
    )
    return json.loads(told.stdout) if told.returncode == 0 else None


def measure_part(
    part: Part, asked: argparse.Namespace, device: dict[str, Any], out: Path | None
) -> bool:
    """Measure one part; return whether all of it worked that could."""
    began = time.monotonic()
    record: dict[str, Any] = {
        "part": part.name,
        "dry": asked.dry,
        "command": " ".join(["python", "benchmarks/gpu.py", *sys.argv[1:]]),
        "machine": device | machine(),
        "tables": {},
        "profiles": {},
    }

    def write() -> None:
        record["seconds"] = time.monotonic() - began
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / f"{part.name}.json").write_text(json.dumps(record, indent=1) + "\n")

    with tempfile.TemporaryDirectory(prefix="samestep-gpu-") as folder:
        scratch = Path(folder)
        record["data"] = prepare(asked.data_dir, scratch / "data", dry=asked.dry)
        threads = 1 if asked.dry else min(8, len(os.sched_getaffinity(0)))
        env = environment(scratch, threads, gpu=not asked.dry)
        if asked.dry:
            env["TORCHDYNAMO_DISABLE"] = "1"  # compiling for a CPU would take a minute
        if part.needs_cifar10 and not asked.dry and "real" not in record["data"]["cifar10"]:
            record["skipped"] = NO_CIFAR10
            print(f"{part.name}: skipped: {NO_CIFAR10}", flush=True)
            write()
            return False
        deadline = began + (math.inf if asked.dry else LIMIT_S)  # a busy CPU takes its time
        for place, table in enumerate(part.tables):
            # Each table has its share of what is left, so that the last one gets a round too.
            left = deadline - PROFILE_S * len(part.profiles) - time.monotonic()
            until = time.monotonic() + left / (len(part.tables) - place)
            rounds = asked.rounds or (1 if asked.dry else part.rounds)
            before, longest, num_told = time.monotonic(), 0.0, 0
            for found, failures in take_turns(table, rounds, scratch / "data", scratch, env):
                record["tables"][table.name] = {"rounds": found, "failed": failures}
                write()
                num_found = sum(map(len, found.values())) + len(failures)
                if num_found > num_told:
                    _tell(part.name, record)  # it is there even if this is cut off
                num_told = num_found
                took, before = time.monotonic() - before, time.monotonic()
                longest = max(longest, took)
                if before + longest > until:
                    break
        _profile(part, record, scratch, env, deadline)
    write()
    _tell(part.name, record)
    wrong = [why for table in record["tables"].values() for why in table["failed"].values()]
    wrong += [found["failed"] for found in record["profiles"].values() if "failed" in found]
    return all("is not installed" in why for why in wrong)


def _profile(
    part: Part, record: dict[str, Any], scratch: Path, env: dict[str, str], deadline: float
) -> None:
    for row in part.profiles:
        if time.monotonic() + PROFILE_S / 2 > deadline:
            record["profiles"][row.name] = {"failed": "no time was left"}
            continue
        try:
            found = measure_row(row, scratch / "data", scratch, env, 0)
        except FailedError as error:
            found = {"failed": str(error)}
        record["profiles"][row.name] = found


def _tell(name: str, record: dict[str, Any]) -> None:
    """Print the medians of what was measured."""
    lines = [f"== {name}, {record['machine']['device']}, {record['seconds']:.0f} s"]
    for table in record["tables"].values():
        for row, rounds in table["rounds"].items():
            values = sorted(one["value"] for one in rounds)
            lines.append(f"  {row}: {values[len(values) // 2]:,.3f}")
        lines += [f"  {row}: {why}" for row, why in table["failed"].items()]
    for row, found in record["profiles"].items():
        told = found.get("failed") or f"{found['kind']}, GPU idle {found['gpu_idle']}"
        lines.append(f"  profile, {row}: {told}")
    print("\n".join(lines), flush=True)


if __name__ == "__main__":
    sys.exit(main())
