"""`samestep sweep` as a user runs it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from samestep.cluster.sweeping.side_by_side import run_here
from samestep.cluster.sweeping.sweep_plan import SweepPlan
from tests.command_line import RECIPE, call, read_json, train_here, tree
from tests.processes import TIMEOUT_S
from tests.tiny import events, until

SEEDS = ",".join(map(str, range(60)))
FLAGS = ("small.py", "--lr", "0.01,0.1", "--no-pictures", "--run-dir", "sweep")


@pytest.fixture
def here(here) -> Path:
    (here / "small.py").write_text(RECIPE)
    return here


def weights(run: Path) -> str:
    return read_json(run / "result.json")["weights_sha256"]


@pytest.mark.slow
def test_with_halving_a_training_that_falls_behind_ends_after_its_first_epoch(here, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ("--lr", "0.1,1e-9", "--epochs", "3", "--halving", "2", "--at-once", "1")
    assert call("sweep", "small.py", *words, "--monitor", "loss", "--run-dir", "sweep") == 0
    epochs = {
        file.parent.name: file.read_text().count('"event": "epoch"')
        for file in here.glob("sweep/lr=*/events.jsonl")
    }
    assert epochs == {"lr=0.1": 3, "lr=1e-9": 1}
    result = read_json(here / "sweep" / "lr=1e-9" / "result.json")
    assert (result["status"], result["reason"]) == ("completed", "successive halving")
    assert result["weights_sha256"]  # it is saved, and could go on


@pytest.mark.parametrize(
    "flags",
    [
        *("--lr 0.01,oops,0.1", "--lr 0.1,0.01 --no-such-flag 1", "--lr 0.1,0.1", "--lr 0.1,0.10"),
        *("--lr 0.1,0.01 --momentum 0.0,0.9", "--batch-size 8 --batch-size-per-rank 4,8"),
        "--halving 3 --engine native,lightning",
        f"--seed {SEEDS} --optimizer sgd,adam --momentum 0.0,0.9",
        f"--seed {','.join(map(str, range(1001)))}",
        *("--resume --lr 1,2", "--at-once 0 --lr 1,2", "--lr 1,2 -- --nodes 2"),
        *("--lr 1,2 --slurm --nproc 2", "--lr 1", "--lr 1,2 --seed", "--lr 1,2 --optuna"),
        *("--lr 1 --lr 2,3", "--lr 1e-3,1e-2 --run-dir --epochs 1"),
    ],
    ids=lambda flags: flags[:40],
)
def test_a_mistake_anywhere_is_named_before_the_first_training(flags, here, refused):
    refused("sweep", "small.py", *flags.split())
    assert {path.name for path in tree(here)} == {"small.py"}


def test_a_million_combinations_of_which_some_are_drawn_need_no_question(here, capfd, monkeypatch):
    monkeypatch.setattr("samestep.shell.commands.sweep.run_here", lambda *_, **__: 0)
    many = ",".join(map(str, range(1, 1001)))
    flags = ("--seed", many, "--epochs", many, "--sample", "20", "--run-dir", "sweep")
    assert call("sweep", "small.py", *flags) == 0
    assert len(read_json(here / "sweep" / "sweep.json")["points"]) == 20


def test_a_training_that_fails_is_told_once_and_the_others_go_on(tmp_path):
    sweep = SweepPlan(folder=tmp_path / "sweep", recipe="x", flags=(), axes={"a": ("1", "2", "3")})
    verbs = {"a=1": ["--version"], "a=2": ["no-such-verb"], "a=3": ["--version"]}
    told = []
    assert run_here(sweep, lambda name: (verbs[name], {}), 2, told.append) == 1
    found = {ended.name: ended for ended in told}
    assert {name: ended.status for name, ended in found.items()} == {
        "a=1": "completed",
        "a=2": "failed",
        "a=3": "completed",
    }
    assert "no-such-verb" in found["a=2"].text
    assert len(told) == 3


def test_on_slurm_each_training_that_has_none_gets_a_job(slurm, here):
    flags = ("small.py", "--lr", "1,2,3,4", "--run-dir", "sweep", "--slurm", "--at-once", "2")
    completed, waiting = here / "sweep" / "lr=1", here / "sweep" / "lr=2"
    completed.mkdir(parents=True)
    (completed / "result.json").write_text('{"status": "completed"}')
    slurm.add(5, waiting, "PENDING")
    assert call("sweep", *flags, "--", "--time", "30") == 0
    (sent,) = (line for line in slurm.calls if line.startswith("sbatch"))
    assert {"--array=2,3%2", "--time=30", "--job-name=sweep"} <= {*sent.split()}
    for task, lr in ((2, 3), (3, 4)):
        script = here / "sweep" / ".array" / str(task) / "job.sbatch"
        assert script.samefile(here / "sweep" / f"lr={lr}" / "job.sbatch")
        assert f"--lr {lr}" in " ".join(script.read_text().replace("\\\n", " ").split())


def num_checkpoints(run: Path) -> int:
    return len(events(run, "checkpoint")) if (run / "events.jsonl").exists() else 0


def test_a_training_that_is_stopped_while_it_starts_has_not_failed(here):
    command = [sys.executable, "-m", "samestep", "sweep", *FLAGS]
    sweeper = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    until(psutil.Process(sweeper.pid).children)
    sweeper.terminate()
    printed = sweeper.communicate(timeout=TIMEOUT_S)[0]
    assert "stopped" in printed
    assert "failed" not in printed


@pytest.mark.slow
def test_a_sweep_goes_on_where_it_was_ended(here, output_of, refused, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    length = ("--epochs", "120", "--checkpoint-every-epochs", "1")
    words = ("sweep", *FLAGS, "--at-once", "1", *length)
    first, second = here / "sweep" / "lr=0.01", here / "sweep" / "lr=0.1"
    for how, code in ((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
        seen = num_checkpoints(second)
        command = [sys.executable, "-m", "samestep", *words]
        sweeper = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until(lambda seen=seen: num_checkpoints(second) > seen)
        children = psutil.Process(sweeper.pid).children(recursive=True)
        for child in children:
            child.suspend()  # lest it is at its end before it is struck
        refused(*words)  # it runs already
        for child in children:
            child.resume()
        os.kill(sweeper.pid, how)
        assert sweeper.wait(TIMEOUT_S) == code
        psutil.wait_procs(children, timeout=TIMEOUT_S)
        assert not any(child.is_running() for child in children)
    before = (first / "events.jsonl").read_bytes()
    assert call(*words) == 0
    assert (first / "events.jsonl").read_bytes() == before
    assert len(events(second, "resume")) == 2
    for run in (first, second):
        lr = run.name.removeprefix("lr=")
        train_here("small.py", "--lr", lr, "--no-pictures", *length, "--run-dir", f"alone-{lr}")
        assert weights(run) == weights(here / f"alone-{lr}")
    runs = json.loads(output_of("runs", "sweep", "--sort", "metric", "--json"))
    ranked = [run["value"] for run in runs]
    assert ranked == sorted(ranked, reverse=True)
