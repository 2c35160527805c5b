"""What measuring costs, whether it adds up, and whether `samestep profile` names what is planted.

    python benchmarks/profiling.py [--quick] [--only overhead,accounting,planted,workers]

Writes `benchmarks/results/profiling.md`. The link of the planted all-reduce is made of two network
namespaces and shaped by `tc`, which takes root; without it that row is left out.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from report import machine  # noqa: E402

from tests.profiling.planted import SITUATIONS, Situation, read  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "profiling.md"
LINK_MBIT = 200
HUGE = Situation(
    "a huge all-reduce on a slow link",
    "communication-bound",
    "--accumulate",
    {"sizes": "1024, 64, 8, 1024"},
    nproc=2,
)
# What a sample of the worker choice costs: some wait, as for a disk, and some compute.
SAMPLES = {
    "a sample waits 1 ms": ("time.sleep(0.001)", 32),
    "a sample computes 0.3 ms": ("sum(range(12_000))", 32),
    "a sample costs nothing": ("pass", 256),
}


def main() -> int:
    """Measure what is asked for and write the page; return 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="little of each, nothing written")
    parts = {"overhead": overhead, "accounting": accounting, "planted": planted, "workers": workers}
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(parts))
    asked = parser.parse_args()
    page, good = [], True
    facts = ", ".join(f"{name} {value}" for name, value in machine().items())
    for name in asked.only:
        with tempfile.TemporaryDirectory(prefix="samestep-profiling-") as folder:
            lines, reached = parts[name](Path(folder), quick=asked.quick)
        good = good and reached
        page += [*lines, ""]
        print("\n".join(lines), flush=True)
    if not asked.quick:
        command = " ".join(["python", "benchmarks/profiling.py", *sys.argv[1:]])
        head = [
            "# Where the time goes: what measuring costs, and whether it is right",
            "",
            f"    {command}",
            "",
            f"{facts}.",
            "",
        ]
        RESULTS.write_text("\n".join([*head, *page]))
    return 0 if good else 1


def samestep(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "samestep", *arguments], check=check, capture_output=True, text=True
    )


def events(run: Path, name: str) -> list[dict[str, Any]]:
    """Return the records of one kind of a run."""
    lines = (run / "events.jsonl").read_text().splitlines()
    return [record for line in lines if (record := json.loads(line))["event"] == name]


# Trains epochs in turns with the laps of phases and without, and prints the seconds of each.
_IN_TURNS = """
import sys, time
from samestep.shell.commands.train import parse
from samestep.core.session.build import build
from samestep.core.training.loop import rehearse
from samestep.core.training.meter import Meter
from samestep.base.phases import Phases
from samestep.core.training.work import epoch_is_full
from samestep.launch.ranks.world import World
_, request = parse(["spiral", "--epochs", "1000000"])
built = build(request, World())
work, state = built.work, built.state
meter = Meter(work, state)
lap, rounds = Phases.lap, int(sys.argv[1])
laps, began = [0], time.perf_counter()
for taken in rehearse(work, state):
    list(meter.count(taken))
    if not epoch_is_full(work, state):
        continue
    meter.settle()
    now = time.perf_counter()
    print(("off", "on")[laps[0] % 2], now - began)
    laps[0] += 1
    if laps[0] > 2 * rounds:
        break
    Phases.lap = lap if laps[0] % 2 else (lambda self, phase: None)
    began = time.perf_counter()
many = Phases()
began = time.perf_counter()
for _ in range(100_000):
    many.lap("forward")
print("lap", (time.perf_counter() - began) / 100_000)
"""


def overhead(_folder: Path, *, quick: bool) -> tuple[list[str], bool]:
    """Measure the price of the phases on the smallest model there is."""
    rounds = 20 if quick else 400
    done = subprocess.run(
        [sys.executable, "-c", _IN_TURNS, str(rounds)], check=True, capture_output=True, text=True
    )
    times: dict[str, list[float]] = {"on": [], "off": [], "lap": []}
    for line in done.stdout.splitlines()[1:]:  # the first epoch warms up
        kind, seconds = line.split()
        times[kind].append(float(seconds))
    pairs = [a / b for a, b in zip(times["on"], times["off"], strict=False)]
    ratio, steps = median(pairs), 219
    step = median(times["on"]) / steps
    laps = 6 * times["lap"][0] / step
    return [
        "## What measuring the phases costs",
        "",
        (
            f"The spiral recipe, {steps} steps per epoch of {step * 1e6:.0f} µs each, {rounds} "
            "epochs with the laps in turns with as many in which they are empty calls."
        ),
        "",
        f"- An epoch with / without, median of the rounds: **{ratio:.4f}** (target: 1.02 at most).",
        f"- One lap takes {times['lap'][0] * 1e9:.0f} ns, a step has six: {laps:.2%} of it.",
    ], ratio <= 1.02 and laps <= 0.02


def accounting(folder: Path, *, quick: bool) -> tuple[list[str], bool]:
    """Compare the sum of the phases with the seconds of training, epoch by epoch."""
    lines = [
        "## Do the phases add up?",
        "",
        "Sum of an epoch's phases over its `train_seconds`, which another clock counts.",
        "",
        "| training | ranks | epochs | smallest | largest |",
        "|---|---:|---:|---:|---:|",
    ]
    slow = SITUATIONS[0].write(folder)
    cases = [
        ("spiral", ()),
        ("spiral", ("--engine", "lightning")),
        (str(slow), ()),
        (str(slow), ("--num-workers", "1")),
    ]
    worst = 0.0
    for number, (target, flags) in enumerate(cases):
        for ranks in (1, 2):
            run = folder / f"run-{number}-{ranks}"
            samestep(
                "train",
                target,
                *flags,
                "--nproc",
                str(ranks),
                "--run-dir",
                str(run),
                "--epochs",
                "2" if quick else "6",
            )
            found = [sum(r["phases"].values()) / r["train_seconds"] for r in events(run, "epoch")]
            worst = max(worst, *(abs(1 - one) for one in found))
            name = " ".join([Path(target).stem.replace("planted", "sleeping data"), *flags])
            lines.append(
                f"| {name} | {ranks} | {len(found)} | {min(found):.4f} | {max(found):.4f} |"
            )
    lines += ["", f"- Largest error: **{worst:.2%}** (target: 2 % at most)."]
    return lines, worst <= 0.02


def planted(folder: Path, *, quick: bool) -> tuple[list[str], bool]:
    """Profile every planted situation; a verdict is right if kind and cause are named."""
    lines = [
        "## Planted situation → verdict",
        "",
        "| planted | ranks | verdict | of the step | ceiling | change | right |",
        "|---|---:|---|---:|---:|---|---|",
    ]
    rights = []
    for number, one in enumerate([*SITUATIONS, HUGE]):
        place = folder / str(number)
        place.mkdir()
        if one is HUGE and not _profile_on_a_slow_link(place):
            lines.append(f"| {one.name} | 2 | left out: it takes root, `ip` and `tc` | | | | |")
            continue
        if one is not HUGE:
            command = one.command(place, 0.5 if quick else 2.0)
            samestep(*command, "--nproc", str(one.nproc))
        verdict = read(place)["verdict"]
        said = f"{verdict['why']} {verdict['change']}"
        right = verdict["kind"] == one.verdict and one.says in said
        rights.append(right)
        name = f"{one.name} ({LINK_MBIT} Mbit/s)" if one is HUGE else one.name
        lines.append(
            f"| {name} | {one.nproc} | {verdict['kind']} | {verdict['share']:.0%} | "
            f"{verdict['ceiling']:.2f} | {verdict['change']} | {'yes' if right else '**no**'} |"
        )
        print(lines[-1], flush=True)
    lines += ["", f"- Right: **{sum(rights)} of {len(rights)}** (target: all, 12 at least)."]
    return lines, all(rights) and len(rights) >= 12


def _profile_on_a_slow_link(folder: Path) -> bool:
    """Profile on two hosts with a slow link between them; return whether that was possible."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return False
    from tests.cluster.hosts import ADDRESSES, two_hosts

    command = [sys.executable, "-m", "samestep", *HUGE.command(folder, 2.0)]
    with two_hosts(folder, "tc") as hosts:
        ranks = []
        for host in (0, 1):
            shape = [
                "tc",
                "qdisc",
                "add",
                "dev",
                hosts.interface(host),
                "root",
                "tbf",
                "rate",
                f"{LINK_MBIT}mbit",
                "burst",
                "256kb",
                "latency",
                "100ms",
            ]
            subprocess.run(["ip", "netns", "exec", hosts.namespace(host), *shape], check=True)
            told = {
                "RANK": host,
                "LOCAL_RANK": 0,
                "WORLD_SIZE": 2,
                "LOCAL_WORLD_SIZE": 1,
                "GROUP_RANK": host,
                "MASTER_ADDR": ADDRESSES[0],
                "MASTER_PORT": 29511,
                "GLOO_SOCKET_IFNAME": hosts.interface(host),
            }
            environment = {**os.environ, **{name: str(value) for name, value in told.items()}}
            ranks.append(
                subprocess.Popen(
                    [*hosts.enter(host), *command], env=environment, stdout=subprocess.DEVNULL
                )
            )
        codes = [rank.wait(timeout=300) for rank in ranks]
    return codes == [0, 0]


def workers(folder: Path, *, quick: bool) -> tuple[list[str], bool]:
    """Compare the number of workers that a sweep chooses with the best of an exhaustive search."""
    values = (0, 1, 2) if quick else (0, 1, 2, 3, 4, 6)
    rounds = 1 if quick else 3
    lines = [
        "## Does the sweep choose the right number of workers?",
        "",
        (
            f"Chosen by `--workers {','.join(map(str, values))}`; then every value trains {rounds} "
            "times as a run of its own, in turns, and its median samples per second count."
        ),
        "",
        "| a sample | chosen | best | chosen / best | samples/s by workers |",
        "|---|---:|---:|---:|---|",
    ]
    good = True
    for number, (name, (work, batch)) in enumerate(SAMPLES.items()):
        place = folder / str(number)
        place.mkdir()
        recipe = _recipe_with(place, work, batch)
        samestep(
            "profile",
            str(recipe),
            "--run-dir",
            str(place / "profile"),
            "--seconds",
            "1",
            "--workers",
            ",".join(map(str, values)),
        )
        chosen = read(place)["sweeps"][0]["best"]
        speeds = _exhaustive(place, recipe, values, rounds, seconds=2 if quick else 5)
        best = max(speeds, key=lambda value: speeds[value])
        ratio = speeds[chosen] / speeds[best]
        good = good and ratio >= 0.95
        all_of_them = ", ".join(f"{value}: {speed:,.0f}" for value, speed in speeds.items())
        lines.append(f"| {name} | {chosen} | {best} | **{ratio:.3f}** | {all_of_them} |")
        print(lines[-1], flush=True)
    return [*lines, "", "- Target: 0.95 at least."], good


def _recipe_with(folder: Path, work: str, batch: int) -> Path:
    sizes = f"64, {batch * 40}, {batch}, 64"
    one = Situation("", "", "", {"sizes": sizes, "train": "Samples()", "sample": "0"})
    path = one.write(folder)
    planted = "time.sleep(0)  # planted: a slow disk"
    assert path.read_text().count(planted) == 1
    path.write_text(path.read_text().replace(planted, work))
    return path


def _exhaustive(
    folder: Path, recipe: Path, values: tuple[int, ...], rounds: int, seconds: float
) -> dict[int, float]:
    """Return the median samples per second of each value, warm, of runs that take turns."""
    speeds: dict[int, list[float]] = {value: [] for value in values}
    for number in range(rounds):
        for value in values:
            run = folder / f"run-{value}-{number}"
            arguments = [
                "train",
                str(recipe),
                "--num-workers",
                str(value),
                "--epochs",
                "1000000",
                "--run-dir",
                str(run),
            ]
            with subprocess.Popen(
                [sys.executable, "-m", "samestep", *arguments], stdout=subprocess.DEVNULL
            ) as training:
                while not (run / "events.jsonl").exists():
                    time.sleep(0.05)
                while not events(run, "epoch"):
                    time.sleep(0.05)
                time.sleep(seconds)
                training.terminate()
            warm = events(run, "epoch")[1:]
            speeds[value].append(
                sum(r["samples"] for r in warm) / sum(r["train_seconds"] for r in warm)
            )
    return {value: median(found) for value, found in speeds.items()}


if __name__ == "__main__":
    sys.exit(main())
