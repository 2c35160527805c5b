"""Kill ranks while they train: how soon the next step follows, and whether anything is lost.

    python benchmarks/elastic.py [--times 6] [--runs 40] [--kills 300] [--seed 1]

Writes `benchmarks/results/elastic.md`. Beside it, in the same run: `torchrun --max-restarts` with a
checkpoint every 100 steps, by hand.
"""

import argparse
import json
import math
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
from pathlib import Path
from typing import Any

import psutil
from report import heading, machine

PAGE = Path(__file__).parent / "results" / "elastic.md"
PEER = Path(__file__).parent / "peers" / "ddp_restarts.py"
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
TIMES = """\
Seconds from a SIGKILL of a rank until a step has ended that was not taken before; {times} kills
each, rank after rank. torchrun: `--max-restarts`, a checkpoint every 100 steps, by hand; missing
where it did not come back within 40 s."""
HEAD = (
    "| training | ranks | samestep, median (worst) | torchrun, median (worst) | times sooner |",
    "|---|---:|---:|---:|---:|",
)
OF_KILLS = """\
{kills} kills at random moments in {runs} trainings (spiral, 3 ranks, 4 virtual ranks; any rank,
sometimes two at once): in {same} the final weights are equal, to the last bit, to those of the
undisturbed run; {twice} steps were taken twice where a rank was left. From the moment that a death
was seen until the ranks are ready for the next step: median {median:.2f} s."""
_POLL_S, PATIENCE_S = 0.001, 40.0


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


def samestep(what: str, num_ranks: int, folder: Path, *flags: str) -> list[str]:
    """Return the command that trains a recipe on the CPU into FOLDER/run."""
    (folder / "convnet.py").write_text(CONVNET)
    target = what if what == "spiral" else "convnet.py"
    command = [sys.executable, "-m", "samestep", "train", target, "--device", "cpu"]
    return [*command, "--nproc", str(num_ranks), "--oversubscribe", "--run-dir", "run", *flags]


def ranks_of(process: psutil.Popen) -> list[psutil.Process]:
    """Return the ranks that a command has started, without newcomers that still import."""
    return [c for c in process.children() if "-m samestep train" in " ".join(c.cmdline())]


def workers_of(process: psutil.Popen) -> list[psutil.Process]:
    """Return the ranks of torchrun."""
    return [c for c in process.children() if PEER.name in " ".join(c.cmdline())]


def newest_step(file: Path, read: Callable[[str], int]) -> int:
    """Return the newest step in a file of lines; 0 if it has none yet."""
    try:
        lines = file.read_text().splitlines()[-20:]
    except FileNotFoundError:
        return 0
    return max(map(read, lines), default=0)


def all_train(events: Path, num_ranks: int) -> bool:
    """Whether newcomers have joined the group again."""
    lines = events.read_text().splitlines() if events.exists() else []
    told = [line for line in lines if '"world_size"' in line and line.endswith("}")]
    return bool(told) and bool(json.loads(told[-1])["world_size"] == num_ranks)


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
        time.sleep(_POLL_S)


def measure_gaps(what: str, num_ranks: int, times: int, scratch: Path) -> tuple[list[float], ...]:
    """Return the gaps of samestep and of torchrun, measured in turn."""
    ours, theirs = scratch / "ours", scratch / "theirs"
    for folder in (ours, theirs):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    flags = ("--elastic", "--elastic-limit", "1000", "--log-every", "1")
    flags = (*flags, "--epochs", "100000", "--checkpoint-every-epochs", "100")
    with started(samestep(what, num_ranks, ours, *flags), ours) as process:
        events = ours / "run" / "events.jsonl"
        steps = partial(newest_step, events, of_record)
        whole = partial(all_train, events, num_ranks)
        mine = [*gaps(process, ranks_of, steps, whole, times, num_ranks)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    torchrun += ["--max-restarts", "1000", "--monitor-interval", "0.1", str(PEER), str(theirs)]
    with started([*torchrun, "1000000", what], theirs) as process:
        file = theirs / "steps.txt"
        its = list[float]()
        with suppress(TimeoutError):
            steps = partial(newest_step, file, int)
            its.extend(gaps(process, workers_of, steps, lambda: True, times, num_ranks))
    return mine, its


def undisturbed(scratch: Path, flags: tuple[str, ...]) -> dict[str, Any]:
    """Return the result of the run that the killed ones are compared with."""
    folder = scratch / "whole"
    folder.mkdir()
    subprocess.run(
        samestep("spiral", 3, folder, *flags), cwd=folder, check=True, capture_output=True
    )
    found: dict[str, Any] = json.loads((folder / "run" / "result.json").read_text())
    return found


def killed_run(
    folder: Path, flags: tuple[str, ...], kills: int, chance: random.Random
) -> tuple[int, dict[str, Any], list[dict[str, Any]]]:
    """Train while ranks are killed at random; return the kills, the result and the records."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    events, done = folder / "run" / "events.jsonl", 0
    more = ("--elastic", "--elastic-limit", "1000")
    with started(samestep("spiral", 3, folder, *flags, *more), folder) as process:
        wait_for(events.exists, PATIENCE_S)
        until = time.monotonic() + 600
        while process.poll() is None:
            if time.monotonic() > until:
                raise TimeoutError
            time.sleep(chance.uniform(0.3, 3.0))
            ranks = ranks_of(process) if done < kills else []
            if len(ranks) == 3 or (len(ranks) > 1 and chance.random() < 0.3):
                for rank in chance.sample(ranks, chance.choice((1, 1, 1, 2))):
                    rank.send_signal(signal.SIGKILL)
                    done += 1
    records = [json.loads(line) for line in events.read_text().splitlines()]
    return done, json.loads((folder / "run" / "result.json").read_text()), records


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=6)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    lines = heading("Elastic: a rank is killed, the others take the next step", machine())
    lines += [TIMES.format(times=asked.times), "", *HEAD]
    with tempfile.TemporaryDirectory() as place:
        scratch = Path(place)
        for what in ("spiral", "convnet"):
            for num_ranks in (2, 3, 4):
                mine, its = measure_gaps(what, num_ranks, asked.times, scratch)
                ratio = statistics.median(its) / statistics.median(mine) if its else math.nan
                row = f"| {what} | {num_ranks} | {told(mine)} | {told(its)} | {ratio:.0f} |"
                print(row, flush=True)
                lines.append(row)
        lines += ["", *random_kills(asked, scratch)]
    PAGE.write_text("\n".join([*lines, ""]))


def random_kills(asked: argparse.Namespace, scratch: Path) -> list[str]:
    """Kill at random in many runs; return what to say of them."""
    flags = ("--epochs", "40", "--virtual-ranks", "4", "--checkpoint-every-steps", "100")
    whole, chance = undisturbed(scratch, flags), random.Random(asked.seed)
    kills = same = twice = 0
    seconds: list[float] = []
    runs = 0
    while runs < asked.runs:
        if kills >= asked.kills:
            break
        each = -(-asked.kills // asked.runs)
        done, result, records = killed_run(scratch / "killed", flags, each, chance)
        runs, kills = runs + 1, kills + done
        same += result["weights_sha256"] == whole["weights_sha256"]
        steps = Counter(r["step"] for r in records if r["event"] == "step")
        newest = [r["step"] for r in records if r["event"] == "resume"]
        twice += sum(times > 1 for step, times in steps.items() if not newest)
        seconds += [r["seconds"] for r in records if r["event"] == "regroup" and r["gone"]]
        print(done, same, flush=True)
    median = statistics.median(seconds)
    return [OF_KILLS.format(kills=kills, runs=runs, same=same, twice=twice, median=median)]


if __name__ == "__main__":
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    main()
