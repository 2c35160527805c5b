"""Count what `samestep check` finds and what it says wrongly, and measure how long it takes.

    python benchmarks/check.py [NAME ...] [--public FOLDER] [--python PYTHON] [--cost]

Checks the scripts of check_plants.py: those with a mistake, and right ones. FOLDER has public
scripts: FOLDER/NAME/ is a copy of somebody's script with a case.json beside it: `origin`
(repository, commit, path), `script`, `arguments`, `launch` ("torchrun" or "python"), `flags` of
the check, `changed` (what had to be changed in it, if anything) and `real` (a code, and why it is a
mistake of the script: it was read). Each is checked as a user would check it. With --cost it is
also run to its end on the same ranks, by itself and under watch, one at a time; a third epoch would
be cut short, so give it arguments for two. Writes `results/check.json` after each script, and
`results/check.md`.
"""

import argparse
import json
import os
import resource
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from check_plants import PLANTS, clean
from report import machine

KEPT = Path(__file__).parent / "results" / "check.json"
RANKS, TIMEOUT_S = 2, 600
WHOLE = ("--steps", "1000000", "--seconds", str(TIMEOUT_S))
NOTES = """\
**Found**: scripts with a planted mistake in which a code about it was reported, of all; a mistake
that no code is about counts as missed. **False**: right scripts with an error or a warning, of all;
in public ones, unless reading the script shows that the finding is right. Advice is not counted.
**Seconds**: the whole check, start of Python and PyTorch included, on two cores, which other
programs used as well if the load is above 4. The public scripts were checked at e8203e6b, at a load
of 11 to 20 (with a load of 3 the median was 12, measured at 71b78b10), and not again since then.
The planted scripts and the right ones were checked at 13982a7c, those about a rule that changed
later again at 6ac5ee9f. **Cost**: the CPU time of a script under watch over that of the script
alone, on the same ranks, with all of its steps.
"""

TRAINCHECK = """\
## TrainCheck's errors

Of the 18 silent errors of TrainCheck's evaluation (OSDI'25) these have their kind planted here:
pytorch-104336 and x-jxmnop-ddp-out-of-sync (moved_after_wrapping, never_synchronised),
deepspeed-1801 (norm_of_own_shard), transformers-33844 (attention_dropout), mmpretrain-702
(frozen_by_attribute), pytorch-forum-84911 (head_after_optimizer: what is trained is in no
optimizer), stackoverflow-60335387 (no_zero_grad). Not planted, with the reason: pytorch-84803,
pytorch-96600 and baichuan2-86 are data lost between GPUs; lightning-thunder-725 and pytorch-115607
are faults of compilers; deepspeed-5794 is a hang of DeepSpeed's experts on several GPUs;
pytorch-51800 and transformers-17877 are about initial weights, before any step; transformers-23723
and -34204 are about inference; stackoverflow-67180955 went away with PyTorch 1.9.
"""

MISSED = {
    "padding_in_loss": "no number tells padding from a class, so the loss is like any other",
    "steps_of_one_rank": "the length is inside a function that LambdaLR calls",
}
"""Why a mistake is not found, by name."""


def main() -> None:
    """Check the scripts, two at a time, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("names", nargs="*", help="of scripts, or kinds: planted, clean, public")
    parser.add_argument("--public", type=Path, help="the folder of public scripts")
    parser.add_argument("--python", default=sys.executable, help="which has what the scripts need")
    parser.add_argument("--jobs", type=int, default=2, help="checks at a time")
    parser.add_argument("--cost", action="store_true")
    given = parser.parse_args()
    found: dict[str, Any] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    lock = threading.Lock()
    with tempfile.TemporaryDirectory() as folder:

        def one(kind: str, name: str, place: Path) -> None:
            case = _case(place)
            said = checked(place, case, given.python)
            if given.cost:
                said |= cost(place, case, given.python)
            with lock:
                kept = found.setdefault(kind, {})
                kept[name] = kept.get(name, {}) | said
                kept[name] |= {
                    key: case[key] for key in ("origin", "changed", "real") if key in case
                }
                print(kind, name, said["codes"], f"{said['seconds']:.1f} s", said.get("cost", ""))
                found["machine"] = machine()
                KEPT.write_text(json.dumps(found, indent=1) + "\n")
                KEPT.with_suffix(".md").write_text(page(found))

        with ThreadPoolExecutor(1 if given.cost else given.jobs) as pool:
            for kind, name, place in scripts(Path(folder), given.public):
                if not given.names or {kind, name} & set(given.names):
                    pool.submit(one, kind, name, place).add_done_callback(
                        lambda done: done.result()
                    )


class _Raw(argparse.RawDescriptionHelpFormatter):
    """Keep the lines of this file's description."""


def scripts(folder: Path, public: Path | None) -> list[tuple[str, str, Path]]:
    """Write the planted and the right scripts into a folder; return kind, name and place of all."""
    texts = {("planted", name): plant.text for name, plant in PLANTS.items()}
    texts |= {("clean", name): text for name, text in clean().items()}
    for (kind, name), text in texts.items():
        (folder / kind / name).mkdir(parents=True)
        (folder / kind / name / "train.py").write_text(text)
    places = sorted(path.parent for path in public.glob("*/case.json")) if public else []
    own = [(kind, name, folder / kind / name) for kind, name in texts]
    return own + [("public", place.name, place) for place in places]


def checked(place: Path, case: dict[str, Any], python: str) -> dict[str, Any]:
    """Return the codes that `samestep check` reports of a script, and how long it took."""
    began = time.perf_counter()
    done = _samestep_check(place, case, python, *case.get("flags", []))
    seconds = round(time.perf_counter() - began, 1)
    if not done.stdout.startswith("{"):
        lines = done.stderr.strip().splitlines() or ["no message"]
        return {"codes": {}, "seen": {}, "failed": lines[-1], "seconds": seconds, "steps": 0}
    said = json.loads(done.stdout)
    codes = {one["code"]: one["severity"] for one in said["findings"]}
    seen = {
        one["code"]: f"{one['file']}:{one['line']}: {one['evidence']}" for one in said["findings"]
    }
    return {"codes": codes, "seen": seen, "failed": "", "seconds": seconds, "steps": said["steps"]}


def cost(place: Path, case: dict[str, Any], python: str) -> dict[str, Any]:
    """Return the CPU seconds of a script to its end, alone and under watch, and their ratio."""
    start = [python]
    if case["launch"] == "torchrun":
        start += ["-m", "torch.distributed.run", f"--nproc_per_node={RANKS}"]
        start += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--local-addr=127.0.0.1"]
    times = []
    with tempfile.TemporaryDirectory() as copy:  # what it writes would be found by the next run
        shutil.copytree(place, copy, dirs_exist_ok=True)
        began = _cpu_of_children()
        subprocess.run(
            [*start, case["script"], *shlex.split(case["arguments"])],
            cwd=copy,
            env=_environment(),
            capture_output=True,
            check=True,
            timeout=TIMEOUT_S,
        )
        times.append(_cpu_of_children() - began)
    began = _cpu_of_children()
    alike = [] if case["launch"] == "torchrun" else ["--nproc", "1"]
    done = _samestep_check(place, case, python, *WHOLE, *alike)
    times.append(_cpu_of_children() - began)
    if done.returncode not in (0, 1):
        return {}
    return {"alone": times[0], "watched": times[1], "cost": times[1] / times[0]}


def _cpu_of_children() -> float:
    """Return the CPU seconds of all processes that were started from here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def wrong(one: dict[str, Any]) -> list[str]:
    """Return the errors and warnings of a script that has no such mistake."""
    told = [code for code, severity in one["codes"].items() if severity != "advice"]
    return [code for code in told if code not in one.get("real", {})]


def page(found: dict[str, Any]) -> str:
    """Return the page as Markdown: the three numbers, the misses, the tables."""
    facts = ", ".join(f"{key} {value}" for key, value in found["machine"].items())
    planted = {name: one for name, one in found.get("planted", {}).items() if name in PLANTS}
    right = {name: one for name, one in found.get("clean", {}).items() if name in clean()}
    public = {name: one for name, one in found.get("public", {}).items() if not one["failed"]}
    hits = [name for name, one in planted.items() if set(PLANTS[name].codes) & set(one["codes"])]
    alarms = [sum(map(bool, map(wrong, kind.values()))) for kind in (right, public)]
    unchecked = len(found.get("public", {})) - len(public)
    real = sum(bool(one.get("real")) for one in public.values())
    every = [*planted.values(), *right.values(), *public.values()]
    costs = [one["cost"] for one in every if "cost" in one]
    numbers = [f"{len(hits)} / {len(planted)}", f"{alarms[0]} / {len(right)}"]
    numbers += [f"{alarms[1]} / {len(public)}"]
    numbers += [f"{statistics.median(one['seconds'] for one in every):.0f}"]
    numbers += [f"{statistics.median(costs):.2f} (of {len(costs)})" if costs else ""]
    lines = [
        "# What `samestep check` finds, and what it says wrongly",
        "",
        "    python benchmarks/check.py --public FOLDER --cost",
        "",
        f"{facts}.",
        "",
        "| found / planted | false / clean | false / public | median seconds | median cost |",
        "|---:|---:|---:|---:|---:|",
        f"| {' | '.join(numbers)} |",
        "",
        NOTES,
        f"{unchecked} more public scripts could not be checked: no step within the time for one.",
        f"{real} of the public ones have a mistake that `check` found.",
        "",
        "## Planted mistakes",
        "",
        "| script | mistake | expected | reported | |",
        "|---|---|---|---|---|",
    ]
    for name, one in planted.items():
        plant = PLANTS[name]
        sign = "found" if name in hits else f"**missed**: {MISSED.get(name, 'not yet read')}"
        row = (name, plant.what, " or ".join(plant.codes) or "no code", _told(one), sign)
        lines.append(f"| {' | '.join(row)} |")
    lines += [
        "",
        TRAINCHECK,
        "## Right scripts",
        "",
        "| script | reported | seconds |",
        "|---|---|---:|",
    ]
    for name, one in right.items():
        lines.append(f"| {name} | {_told(one)} | {one['seconds']:.0f} |")
    lines += [
        "",
        "## Public scripts",
        "",
        "| script | from | reported | steps | seconds | cost | |",
        "|---|---|---|---:|---:|---:|---|",
    ]
    for name, one in sorted(found.get("public", {}).items()):
        notes = [f"{code} is right: {why}" for code, why in one.get("real", {}).items()]
        notes += [f"changed: {one['changed']}"] if one.get("changed") else []
        ratio = f"{one['cost']:.2f}" if "cost" in one else ""
        row = (name, one["origin"], _told(one), str(one["steps"]), f"{one['seconds']:.0f}", ratio)
        lines.append(f"| {' | '.join(row)} | {'; '.join(notes)} |")
    return "\n".join(lines) + "\n"


def _told(one: dict[str, Any]) -> str:
    if one["failed"]:
        return f"could not be checked: {one['failed']}"
    return ", ".join(f"{code} ({kind})" for code, kind in sorted(one["codes"].items())) or "nothing"


def _case(place: Path) -> dict[str, Any]:
    """Return how a script is started; a planted one has nothing to say."""
    path = place / "case.json"
    told = json.loads(path.read_text()) if path.exists() else {}
    return {"script": "train.py", "arguments": "", "launch": "torchrun"} | told


def _samestep_check(
    place: Path, case: dict[str, Any], python: str, *flags: str
) -> subprocess.CompletedProcess[str]:
    words = ["--", *shlex.split(case["arguments"])]
    return subprocess.run(
        [python, "-m", "samestep", "check", case["script"], "--json", *flags, *words],
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
