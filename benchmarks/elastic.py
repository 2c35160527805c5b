"""Kill ranks while they train: how soon the next step follows, and whether anything is lost.

    python benchmarks/elastic.py [PART ...] [--times 6] [--runs 40] [--kills 300] [--seed 1]

Parts: `gaps`, from a kill to the next step, beside `torchrun --max-restarts` with a checkpoint
every 100 steps, by hand, and torchft where it is installed; `kills` at random moments; `throughput`
with a kill every 20 s; `cost` when nobody dies. Writes each part into
`benchmarks/results/elastic.md`, after each of its rows.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import psutil
from report import machine

import samestep

PAGE = Path(__file__).parent / "results" / "elastic.md"
PEERS = Path(__file__).parent / "peers"
CONVNET = """
import torch
from torch import nn
from samestep import Recipe, Splits
def model():
    return nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3),
                         nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(800, 2))
def data():
    x = torch.randn(4096, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    return Splits(train=(x, (x.flatten(1)[:, 0] > 0).long()))
recipe = Recipe(model=model, data=data, settings={"batch_size": 32})
"""
TITLES = {
    "gaps": "From a kill to the next step",
    "kills": "Kills at random moments",
    "throughput": "Throughput with a kill every 20 s",
    "cost": "The cost when nobody dies",
}
TIMES = """\
Seconds from a SIGKILL of a rank until a step has ended that was not taken before; {times} kills
each, rank after rank. torchrun: `--max-restarts`, a checkpoint every 100 steps, by hand; missing
where it did not come back within 40 s. torchft: each rank a replica on Gloo, as in its examples;
what a dead replica had of a step is lost there."""
HEAD = (
    "| training | ranks | samestep, median (worst) | torchrun | sooner | torchft | sooner |",
    "|---|---:|---:|---:|---:|---:|---:|",
)
OF_KILLS = """\
Spiral, 3 ranks, any of them, sometimes two at once, sometimes one more while the others regroup, or
one that is about to join. An evaluation and a checkpoint every 100 steps. Seconds: from the moment
that a death was seen until the ranks are ready for the next step, where one that trained is left;
where all were dead, new ones have to start first.

| training | runs | kills | same weights | steps taken twice | lost | all dead | s, median (worst) |
|---|---:|---:|---:|---:|---:|---:|---:|
"""
OF_THROUGHPUT = """\
Steps in {window:.0f} s with three kills, over those of the same training undisturbed, in turn;
2 ranks on 2 cores, replacement on: the new rank's start takes time of the same cores.

| training | each pair |
|---|---:|
"""
OF_COST = """\
Seconds of an epoch's steps with `--elastic`, the median of all but the first, over those without,
in turn; 2 ranks on 2 cores.

| training | median (each pair) |
|---|---:|
"""
_WINDOW_S = 60.0
_POLL_EVERY_S, PATIENCE_S = 0.001, 40.0


def told(seconds: list[float]) -> str:
    """Return a median and the worst; a dash for nothing."""
    return f"{statistics.median(seconds):.2f} ({max(seconds):.2f})" if seconds else "–"


@contextmanager
def started(command: list[str], folder: Path) -> Iterator[psutil.Popen]:
    """Start a command; when this ends, nothing of it is left."""
    with (folder / "output.txt").open("w") as output:
        process = psutil.Popen(command, cwd=folder, stdout=output, stderr=output)
        try:
            yield process
        finally:
            with suppress(psutil.NoSuchProcess):
                for one in [*process.children(recursive=True), process]:
                    one.kill()
            process.wait()


def command_of(what: str, num_ranks: int, folder: Path, *flags: str) -> list[str]:
    """Return the command that trains a recipe on the CPU into FOLDER/run."""
    (folder / "convnet.py").write_text(CONVNET)
    target = what if what == "spiral" else "convnet.py"
    command = [sys.executable, "-m", "samestep", "train", target, "--device", "cpu"]
    return [*command, "--nproc", str(num_ranks), "--oversubscribe", "--run-dir", "run", *flags]


def ranks_of(process: psutil.Popen) -> list[psutil.Process]:
    """Return the ranks that a command has started, without newcomers that still import."""
    found = []
    for child in process.children():
        with suppress(psutil.Error):  # it has just ended
            if "-m samestep train" in " ".join(child.cmdline()):
                found.append(child)
    return found


def workers_of(process: psutil.Popen) -> list[psutil.Process]:
    """Return the ranks of a peer."""
    return [c for c in process.children() if f"{PEERS}/" in " ".join(c.cmdline())]


def newest_step(file: Path, read: Callable[[str], int]) -> int:
    """Return the newest step in a file of lines; 0 if it has none yet."""
    return max(map(read, last_lines(file)[-20:]), default=0)


def last_lines(file: Path) -> list[str]:
    """Return the whole lines in the last 8 KB of a file: it is read a thousand times a second."""
    try:
        with file.open("rb") as opened:
            opened.seek(max(0, opened.seek(0, os.SEEK_END) - 8192))
            return opened.read().decode().split("\n")[1:-1]
    except FileNotFoundError:
        return []


def all_train(events: Path, num_ranks: int) -> bool:
    """Whether newcomers have joined the group again."""
    lines = events.read_text().splitlines() if events.exists() else []
    told = [line for line in lines if '"world_size"' in line and line.endswith("}")]
    return bool(told) and bool(json.loads(told[-1])["world_size"] == num_ranks)


def all_write(file: Path, num_ranks: int) -> bool:
    """Whether all ranks have taken part in the newest steps of a peer."""
    return len({line.split()[0] for line in last_lines(file)[-100:]}) == num_ranks


def of_line(line: str) -> int:
    """Return the step in a peer's line, of a rank and a step."""
    return int(line.rsplit(maxsplit=1)[-1])


def of_record(line: str) -> int:
    """Return the step of a `step` record; 0 for others."""
    record = json.loads(line) if line.endswith("}") else {}
    return int(record["step"]) if record.get("event") == "step" else 0


def gaps(
    process: psutil.Popen,
    found: Callable[[psutil.Popen], list[psutil.Process]],
    steps: Callable[[], int],
    are_whole: Callable[[], bool],
    times: int,
    whole: int,
) -> Iterator[float]:
    """Kill a rank, again and again; yield the seconds until a step follows that was never taken."""
    for kill in range(times):
        wait_for(lambda: are_whole() and len(found(process)) == whole, PATIENCE_S)
        before = steps()
        wait_for(lambda: steps() > before + 150, PATIENCE_S)  # noqa: B023 - called here
        victims = found(process)
        began = time.perf_counter()
        victims[kill % whole].send_signal(signal.SIGKILL)
        time.sleep(0.005)  # a step that was already done is not the next one
        reached = steps()
        wait_for(lambda: steps() > reached, PATIENCE_S)  # noqa: B023 - as above
        yield time.perf_counter() - began


def wait_for(holds: Callable[[], bool], most_s: float) -> None:
    """Wait until something holds."""
    until = time.monotonic() + most_s
    while not holds():
        if time.monotonic() > until:
            raise TimeoutError
        time.sleep(_POLL_EVERY_S)


def peers(num_ranks: int) -> dict[str, list[str]]:
    """Return the commands of others, to which folder, steps and the training are added."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    torchrun += ["--max-restarts", "1000", "--monitor-interval", "0.1"]
    found = {"torchrun": [*torchrun, f"{PEERS}/ddp_restarts.py", str(num_ranks)]}
    if find_spec("torchft"):
        found["torchft"] = [sys.executable, f"{PEERS}/ddp_torchft.py", str(num_ranks)]
    return found


def measure_gaps(what: str, num_ranks: int, times: int, scratch: Path) -> dict[str, list[float]]:
    """Return the gaps of samestep and of its peers, measured in turn."""
    ours = scratch / "ours"
    shutil.rmtree(ours, ignore_errors=True)
    ours.mkdir()
    flags: tuple[str, ...] = ("--elastic", "--elastic-limit", "1000", "--log-every", "1")
    flags = (*flags, "--epochs", "100000", "--checkpoint-every-epochs", "100")
    with started(command_of(what, num_ranks, ours, *flags), ours) as process:
        events = ours / "run" / "events.jsonl"
        steps = partial(newest_step, events, of_record)
        whole = partial(all_train, events, num_ranks)
        found = {"samestep": [*gaps(process, ranks_of, steps, whole, times, num_ranks)]}
    for name, command in peers(num_ranks).items():
        shutil.rmtree(theirs := scratch / name, ignore_errors=True)
        theirs.mkdir()
        found[name] = []
        with started([*command, str(theirs), "1000000", what], theirs) as process:
            steps = partial(newest_step, theirs / "steps.txt", of_line)
            whole = partial(all_write, theirs / "steps.txt", num_ranks)
            with suppress(TimeoutError):
                found[name].extend(gaps(process, workers_of, steps, whole, times, num_ranks))
    return found


def trained(folder: Path, flags: tuple[str, ...], what: str = "spiral", num_ranks: int = 3) -> Path:
    """Train to the end, undisturbed; return the run."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    command = command_of(what, num_ranks, folder, *flags)
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder / "run"


def killed_run(folder: Path, flags: tuple[str, ...], kills: int, chance: random.Random) -> int:
    """Train into FOLDER/run while ranks are killed at random; return how many were."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    done, more = 0, ("--elastic", "--elastic-limit", "1000")
    with started(command_of("spiral", 3, folder, *flags, *more), folder) as process:
        wait_for((folder / "run" / "events.jsonl").exists, 120.0)
        until = time.monotonic() + 600
        while process.poll() is None:
            if time.monotonic() > until:
                raise TimeoutError
            # Some are killed while the others regroup.
            time.sleep(
                chance.uniform(0.3, 3.0) if chance.random() < 0.8 else chance.uniform(0, 0.3)
            )
            ranks = ranks_of(process) if done < kills else []
            if len(ranks) == 3 or (len(ranks) > 1 and chance.random() < 0.3):
                for rank in chance.sample(ranks, chance.choice((1, 1, 1, 2))):
                    rank.send_signal(signal.SIGKILL)
                    done += 1
    if process.returncode:
        raise RuntimeError((folder / "output.txt").read_text()[-4000:])
    return done


def weights_apart(one: Path, other: Path) -> float:
    """Return how far the weights of two runs are apart, relative to the largest."""
    mine, its = (samestep.load(run).state_dict() for run in (one, other))
    largest = max(float(tensor.abs().max()) for tensor in its.values())
    return max(float((mine[name] - its[name]).abs().max()) for name in its) / largest


def of_kills(asked: argparse.Namespace, scratch: Path) -> Iterator[str]:
    """Kill at random in many runs; yield the table, again after each run."""
    always = ("--epochs", "24", "--checkpoint-every-steps", "100", "--eval-every-steps", "100")
    kinds = {
        "4 virtual ranks, to the last bit": ("--virtual-ranks", "4"),
        "float64, no dropout, to 1e-10": ("--precision", "fp64", "--dropout", "0"),
    }
    names, chance = [*kinds], random.Random(asked.seed)
    whole = {name: trained(scratch / name[:7], (*always, *kinds[name])) for name in names}
    totals = {name: Counter[str]() for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    each = -(-asked.kills // asked.runs)
    done = 0
    for number in count():
        if number >= asked.runs and done >= asked.kills:  # a run may end before its last kill
            return
        name = names[number % 4 == 3]
        total, run = totals[name], scratch / "killed" / "run"
        total["runs"] += 1
        total["kills"] += (killed := killed_run(run.parent, (*always, *kinds[name]), each, chance))
        done += killed
        records = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        result = json.loads((run / "result.json").read_text())
        its = json.loads((whole[name] / "result.json").read_text())
        if "virtual" in name:
            total["same"] += result["weights_sha256"] == its["weights_sha256"]
        else:
            total["same"] += weights_apart(run, whole[name]) < 1e-10
        # All died, and the newest checkpoint was continued from: its steps are taken again.
        again = any(record["event"] == "resume" for record in records)
        steps = Counter(r["step"] for r in records if r["event"] == "step")
        total["twice"] += 0 if again else sum(times > 1 for times in steps.values())
        total["lost"] += its["steps"] - result["steps"]
        deaths = [r for r in records if r["event"] == "regroup" and r["gone"]]
        left = [r for r in deaths if len(r["gone"]) < r["ranks_before"]]
        total["all dead"] += len(deaths) - len(left)
        seconds[name] += [r["seconds"] for r in left]
        rows = [
            f"| {name} | {found['runs']} | {found['kills']} | {found['same']} | {found['twice']} | "
            f"{found['lost']} | {found['all dead']} | {told(seconds[name])} |"
            for name, found in totals.items()
        ]
        yield OF_KILLS + "\n".join(rows)


def of_gaps(asked: argparse.Namespace, scratch: Path) -> Iterator[str]:
    """Measure how soon the next step follows; yield the table, again after each row."""
    rows = [TIMES.format(times=asked.times), "", *HEAD]
    for what in ("spiral", "convnet"):
        for num_ranks in (2, 3, 4):
            found = measure_gaps(what, num_ranks, asked.times, scratch)
            cells = [what, num_ranks, told(mine := found["samestep"])]
            for its in (found["torchrun"], found.get("torchft", [])):
                sooner = f"{statistics.median(its) / statistics.median(mine):.0f} ×" if its else "–"
                cells += [told(its), sooner]
            rows.append(f"| {' | '.join(map(str, cells))} |")
            yield "\n".join(rows)


def steps_in_window(what: str, folder: Path, *, kill: bool) -> int:
    """Return the steps that 2 ranks take within a time, with three kills in it or none."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    flags: tuple[str, ...] = ("--elastic", "--elastic-limit", "1000", "--log-every", "10")
    flags = (*flags, "--epochs", "100000", "--checkpoint-every-epochs", "100")
    with started(command_of(what, 2, folder, *flags), folder) as process:
        steps = partial(newest_step, folder / "run" / "events.jsonl", of_record)
        wait_for(lambda: steps() > 150, PATIENCE_S)
        began, first = time.monotonic(), steps()
        for third in range(3):
            at = began + _WINDOW_S * (third + 0.5) / 3
            time.sleep(at - time.monotonic())
            if kill:
                ranks_of(process)[third % 2].send_signal(signal.SIGKILL)
        time.sleep(began + _WINDOW_S - time.monotonic())
        return steps() - first


def of_throughput(asked: argparse.Namespace, scratch: Path) -> Iterator[str]:
    """Measure what deaths and new ranks take of the throughput; yield the table after each row."""
    told = OF_THROUGHPUT.format(window=_WINDOW_S)
    for what in ("spiral", "convnet"):
        pairs = []
        for _ in range(asked.pairs):
            killed, whole = (steps_in_window(what, scratch / "t", kill=k) for k in (True, False))
            pairs.append(f"{killed / whole:.2f}")
        told += f"| {what} | {', '.join(pairs)} |\n"
        yield told


def step_seconds(what: str, folder: Path, *flags: str) -> float:
    """Return the seconds of an epoch's steps: the median of those after the first."""
    run = trained(folder, ("--epochs", "41" if what == "spiral" else "13", *flags), what, 2)
    epochs = [r for r in samestep.read_records(run) if r["event"] == "epoch"]
    return statistics.median(record["train_seconds"] for record in epochs[1:])


def of_cost(asked: argparse.Namespace, scratch: Path) -> Iterator[str]:
    """Measure what `--elastic` costs when nobody dies; yield the table after each row."""
    told = OF_COST
    for what in ("spiral", "convnet"):
        pairs = []
        for _ in range(asked.pairs):
            mine, its = (step_seconds(what, scratch / "c", *f) for f in (("--elastic",), ()))
            pairs.append(mine / its)
        each = ", ".join(f"{ratio:.3f}" for ratio in sorted(pairs))
        told += f"| {what} | {statistics.median(pairs):.3f} ({each}) |\n"
        yield told


def write(part: str, told: str, facts: dict[str, str]) -> None:
    """Put a part into the page, in place of what was there of it."""
    before = PAGE.read_text() if PAGE.exists() else ""
    sections = dict(one.split("\n", 1) for one in before.split("\n## ")[1:])
    command = " ".join(["python", "benchmarks/elastic.py", *sys.argv[1:]])
    where = ", ".join(f"{name} {value}" for name, value in facts.items())
    sections[TITLES[part]] = f"\n    {command}\n\n{where}.\n\n{told.strip()}\n"
    title = "# Elastic: a rank is killed, the others take the next step\n"
    kept = [f"\n## {name}\n{sections[name]}" for name in TITLES.values() if name in sections]
    PAGE.write_text(title + "".join(kept))


def main() -> None:
    """Measure, and write the page."""
    parts = {"gaps": of_gaps, "kills": of_kills, "throughput": of_throughput, "cost": of_cost}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(parts)}")
    parser.add_argument("--times", type=int, default=6)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    for part in asked.parts or [*parts]:
        facts = machine()
        with tempfile.TemporaryDirectory() as place:
            for told in parts[part](asked, Path(place)):
                write(part, told, facts)


if __name__ == "__main__":
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    main()
