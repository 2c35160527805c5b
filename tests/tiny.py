"""A tiny recipe of an odd size, and what two runs of it are compared by.

131 training samples and a global batch of 12: the last global batch of an epoch is incomplete, and
no world size divides the data. An epoch has 11 steps, a run 66, with a checkpoint every 4.
"""

import hashlib
import itertools
import json
import math
import os
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from samestep import read_records
from tests.command_line import call, train_here
from tests.faults import Fault, command_line
from tests.processes import TIMEOUT_S, Ranks, free_port, run_ranks, start_ranks

RECIPE = """
import time
from dataclasses import dataclass
from pathlib import Path
import torch
from torch import nn
from samestep import Recipe, Splits
pace = Path(__file__).with_suffix(".pace")  # seconds a step: gives a test time to strike
seconds = float(pace.read_text()) if pace.exists() else 0.0
@dataclass(frozen=True)
class Options:
    hidden: int = 16
    samples: int = 131
def data(options):
    generator = torch.Generator().manual_seed(7)
    n = options.samples
    x = torch.randn(n + 78, 8, generator=generator, dtype=torch.float64)
    y = (x[:, 0] * x[:, 1] > 0).long()
    return Splits(train=(x[:n], y[:n]), validation=(x[n:n + 37], y[n:n + 37]),
                  test=(x[n + 37:], y[n + 37:]))
def model(options):
    return nn.Sequential(nn.Linear(8, options.hidden), nn.Tanh(), nn.Linear(options.hidden, 2))
def loss(outputs, targets):
    time.sleep(seconds)  # a model as slow as the test wants it
    return nn.functional.cross_entropy(outputs, targets)
def accuracy(outputs, targets):
    return outputs.argmax(dim=1) == targets
recipe = Recipe(model=model, data=data, loss=loss, options=Options, settings={
    "epochs": 6, "batch_size": 12, "lr": 0.01, "precision": "fp64", "log_every": 1,
    "checkpoint_every_steps": 4,
}, metrics={"accuracy": accuracy})
"""
SLEEP = next(line for line in RECIPE.splitlines(keepends=True) if "time.sleep" in line)
STEPS_PER_EPOCH, STEPS = 11, 66

# What differs from run to run: what the clock says, and the memory.
_OF_THE_CLOCK = {
    *("seconds", "samples_per_s", "train_seconds", "time", "phases", "ranks"),
    *("terms_per_s", "flops_per_s", "mfu", "peak_memory_bytes"),
}
_outputs = itertools.count()


def changed(text: str, *changes: tuple[str, str]) -> str:
    """Return a text with some of it replaced; each old part has to be there."""
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


def write_recipe(folder: Path, text: str = RECIPE, name: str = "tiny.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def set_pace(recipe: Path, seconds: float) -> None:
    """Let each step of the recipe take at least this long, from the next start on."""
    recipe.with_suffix(".pace").write_text(str(seconds))


def start(
    target: Path, *flags: str, faults: tuple[Fault, ...] = (), world_size: int = 1, folder: Path
) -> Ranks:
    """Start `samestep train TARGET` on N ranks, with faults planted in them."""
    arguments = ["train", str(target), *flags]
    output = folder / f"output-{next(_outputs)}"
    return start_ranks(command_line, world_size, output, arguments, faults)


def train(
    target: Path, *flags: str, faults: tuple[Fault, ...] = (), world_size: int = 1, folder: Path
) -> Ranks:
    """Run `samestep train TARGET` to its end, which must be a good one."""
    ranks = start(target, *flags, faults=faults, world_size=world_size, folder=folder)
    assert ranks.wait() == [0] * world_size, ranks.output()
    return ranks


def resume(run: Path, *flags: str, world_size: int = 1, folder: Path) -> Ranks:
    return train(run, "--resume", *flags, world_size=world_size, folder=folder)


def trained(recipe: Path, run: Path, *flags: str, on: int = 1) -> str:
    """Train into a run directory, to a good end; return what rank 0 printed.

    Alone it trains in this process: a forked rank takes twice the time.
    """
    return _to_the_end([str(recipe), "--run-dir", str(run), *flags], run, on)


def resumed(run: Path, *flags: str, on: int = 1) -> str:
    return _to_the_end([str(run), "--resume", *flags], run, on)


def _to_the_end(words: list[str], run: Path, on: int) -> str:
    if on == 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # as a rank's own, which fail no test
            return train_here(*words)
    return train(Path(words[0]), *words[1:], world_size=on, folder=run.parent).printed(0)


def struck(recipe: Path, run: Path, fault: Fault, *flags: str, on: int = 1) -> Ranks:
    """Train with a fault that ends all ranks, by SIGKILL or with the code of another signal."""
    words = ("--run-dir", str(run), *flags)
    ranks = start(recipe, *words, faults=(fault,), world_size=on, folder=run.parent)
    code = -fault.signum if fault.signum == signal.SIGKILL else 128 + fault.signum
    assert ranks.wait() == [code] * on, ranks.output()
    return ranks


def train_all(trainings: Sequence[Sequence[str]], *, on: int, folder: Path) -> None:
    """Train one after the other on the same ranks: each start of ranks would take its time."""
    words = [[str(word) for word in training] for training in trainings]
    output = folder / f"output-{next(_outputs)}"
    run_ranks(train_one_by_one, on, output, words, [free_port() for _ in words])


def train_one_by_one(trainings: list[list[str]], ports: list[int]) -> None:
    """Train on the ranks that this process is one of; each training meets at a port of its own."""
    from samestep.shell.api.call import as_in_fresh_process

    for words, port in zip(trainings, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        with as_in_fresh_process():
            assert call("train", *words) == 0, words


def events(run: Path, *names: str) -> list[dict[str, Any]]:
    """Return a run's records of these events, without the superseded ones."""
    return [record for record in read_records(run) if record["event"] in names]


def until(condition: Callable[[], bool], ranks: Ranks | None = None) -> None:
    """Wait until something has happened; fail if a rank ends before, or if it takes too long."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        if ranks is not None:
            codes = [process.exitcode for process in ranks.processes]
            assert codes == [None] * len(codes) or condition(), f"{codes}\n{ranks.output()}"
        time.sleep(0.001)  # another process's files change without an event to await


def num_records(run: Path) -> int:
    file = run / "events.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def all_records(run: Path) -> list[dict[str, Any]]:
    """Return every whole record in the file, the superseded ones too."""
    return [json.loads(line) for line in (run / "events.jsonl").read_bytes().split(b"\n")[:-1]]


def account(run: Path, *more: str) -> list[dict[str, Any]]:
    """Return what a run says of its training, in more events too, without what the clock says."""
    return [
        {key: value for key, value in flat.items() if key not in _OF_THE_CLOCK}
        for record in read_records(run)
        if record["event"] in ("step", "epoch", "evaluation", *more)
        for flat in [{**record, "metrics": 0, **record.get("metrics", {})}]
    ]


def assert_same_training(run: Path, reference: Path, tolerance: float = 1e-12) -> None:
    """Compare all records and the final weights of two runs; tolerance 0 means every bit."""
    ours, theirs = account(run), account(reference)
    assert [_name(r) for r in ours] == [_name(r) for r in theirs]
    assert_close_records(ours, theirs, tolerance)
    mine, its = last_state(run), last_state(reference)
    assert mine["position"]["step"] == its["position"]["step"]
    assert_close(mine["model"], its["model"], tolerance)
    states = [one["optimizer"].get("state", one["optimizer"]) for one in (mine, its)]
    assert_close(*states, tolerance)


def assert_close_records(ours: list[dict], theirs: list[dict], tolerance: float) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            equal = value == other[key] or (
                isinstance(value, float)
                and math.isclose(value, other[key], rel_tol=tolerance, abs_tol=tolerance)
            )
            assert equal, (one, other)


def _name(record: dict[str, Any]) -> tuple[Any, ...]:
    return record["event"], record["step"], record["epoch"], record.get("split")


def assert_close(one: Any, other: Any, tolerance: float) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_close(one[key], other[key], tolerance)
    elif isinstance(one, list | tuple):
        for mine, its in zip(one, other, strict=True):
            assert_close(mine, its, tolerance)
    elif not isinstance(one, torch.Tensor):
        assert one == other
    elif not torch.equal(one, other):  # infinities, as in masks, have no difference
        assert float((one - other).abs().max()) <= tolerance


def read_index(run: Path) -> dict[str, Any]:
    table: dict[str, Any] = json.loads((run / "checkpoints" / "index.json").read_text())
    return table


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def last_state(run: Path) -> dict[str, Any]:
    """Return the content of a run's last checkpoint, with whole tensors if it is sharded."""
    path = run / "checkpoints" / read_index(run)["last"]["path"]
    state: dict[str, Any] = torch.load(path, weights_only=True)
    if (parts := path.with_suffix(".shards")).exists():
        from samestep.base.run import shards

        state = shards.read(parts, state, None)
    return state


def newest_announced(run: Path) -> int:
    """Check that every announced checkpoint is whole and known; return the newest one's step.

    Announced is what the index names and what a `checkpoint` record tells. Of a step that was
    announced twice, the later one counts.
    """
    if not (run / "checkpoints" / "index.json").exists():
        assert not [r for r in all_records(run) if r["event"] == "checkpoint"]
        return 0
    known = {entry["step"]: entry for entry in read_index(run)["checkpoints"]}
    for entry in known.values():
        for place, digest in {entry["path"]: entry["sha256"], **entry.get("files", {})}.items():
            assert sha256(run / "checkpoints" / place) == digest, entry
    told = {r["step"]: r for r in all_records(run) if r["event"] == "checkpoint"}
    assert told.keys() <= known.keys()
    return max(known)


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
