"""A validation between two steps: recorded where it stands, and nothing of the training differs."""

import contextlib
import random
import signal

import numpy as np
import pytest
import torch
from torch import nn

from tests import tiny
from tests.command_line import read_json
from tests.loops.same import account, assert_close, assert_same
from tests.loops.scripts import weights
from tests.loops.test_going_on import ended, records
from tests.loops.test_loops import Training


def train(path, where, stops=None):
    """Train 2 epochs of 3 steps with draws everywhere; validate at 1, 3, … steps, if anywhere."""
    torch.manual_seed(0)
    t = Training(path, resume=True, log_every=1, checkpoint_every_steps=1)
    norm = nn.BatchNorm1d(2)
    t.model, t.data = nn.Sequential(norm, nn.Dropout(0.5), t.model), torch.rand(13, 2)

    def validate(run):
        t.model.eval()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            for batch in run.validation(t.data[:1] + 1, 4):
                noise = torch.rand(()) + random.random() + float(np.random.rand())  # noqa: NPY002
                run.log(loss=t.model(batch.data).float().square().mean(), noise=noise)
        t.model.train()

    with torch.autocast("cpu", dtype=torch.bfloat16), t.run as run:
        for _ in run.epochs(2, state={**t.state, "model": t.model}):
            for batch in run.batches(t.data, 4, drop_last=True):
                if where == "before" and batch.step % 2:
                    validate(run)
                own = random.random() + float(torch.rand(()))
                loss = t.model(batch.data + own).float().square().mean() + np.random.rand()  # noqa: NPY002
                # The statistics count in training, as those of spectral normalisation do.
                loss = loss + norm.running_mean.sum()
                t.optimizer.zero_grad()
                run.backward(loss, t.model)
                t.optimizer.step()
                run.log(loss=loss, drawn=batch.uniform().mean())
                if where == "after" and batch.step % 2 == 0:
                    validate(run)
                if run.step + 1 == stops:
                    signal.raise_signal(signal.SIGTERM)
    return t


def assert_untouched(folder):
    """Assert that of two trainings the one with validations is the other one, bit by bit."""
    whole, without = account(folder / "with"), account(folder / "without")
    assert [r for r in whole if r["event"] != "evaluation"] == without
    assert len(whole) == len(without) + 3
    assert_close(weights(folder / "with"), weights(folder / "without"), 0)


@pytest.mark.parametrize(("where", "second"), [("before", 2), ("after", 1)])
def test_with_it_the_training_is_the_same_bit_by_bit(tmp_path, where, second):
    train(tmp_path / "without", None)
    train(tmp_path / "with", where)
    for stops in (1, 3):  # right after a validation; the next resume does one before its step
        with ended(128 + signal.SIGTERM):
            train(tmp_path / "parts", where, stops)
    train(tmp_path / "parts", where)
    assert_untouched(tmp_path)
    assert_same(tmp_path / "parts", tmp_path / "with", tolerance=0)
    evaluations = records(tmp_path / "with", "evaluation")
    assert [(r["step"], r["epoch"]) for r in evaluations] == [(1, 1), (3, second), (5, 2)]
    assert len({r["noise"] for r in evaluations}) == 3
    assert len({r["loss"] for r in evaluations}) == 3


def test_its_seconds_are_not_those_of_the_training(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    t = Training(tmp_path, log_every=1)
    with t.run as run:
        for _ in run.epochs(1, state=t.state):
            for batch in run.batches(t.data, 5):
                t.step(batch)
                clock[0] += 1
                for _ in run.validation(t.data, 10):
                    clock[0] += 100
    assert [r["seconds"] for r in records(tmp_path, "evaluation")] == [100, 100]
    assert [r["train_seconds"] for r in records(tmp_path, "epoch")] == [2]


class Wrapping(torch.optim.SGD):
    def __init__(self, inner):
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def state_dict(self):
        return self.inner.state_dict()

    def step(self):
        self.inner.step()


def scaled(run, t, loss):
    """Go through a step that the scaler leaves out, as the gradients are infinite."""
    scaler = torch.amp.GradScaler("cpu")
    run.backward(scaler.scale(loss * float("inf")), t.model)
    scaler.step(t.optimizer)
    scaler.update()


def stepped_by_another(run, t, loss):
    run.backward(loss, t.model)
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1).step()


def dropped(run, t, loss):
    run.backward(loss, t.model)
    t.optimizer.zero_grad(set_to_none=False)


def wrapped(run, t, loss):
    run.backward(loss, t.model)
    t.state["optimizer"].step()


STEPS = {
    "none": (lambda run, t, loss: run.backward(loss, t.model), 2),
    "another optimizer's": (stepped_by_another, 2),
    "left out by a scaler": (scaled, 0),
    "dropped": (dropped, 0),
    "by a wrapper": (wrapped, 0),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_validation_while_gradients_wait_for_their_optimizer_is_refused(tmp_path, capfd, step):
    t, (take, code) = Training(tmp_path), STEPS[step]
    if take is wrapped:
        t.state["optimizer"] = Wrapping(t.optimizer)
    with ended(code) if code else contextlib.nullcontext(), t.run as run:
        for _ in run.epochs(1, state=t.state):
            for batch in run.batches(t.data, 5):
                take(run, t, t.model(batch.data).square().mean())
                for _ in run.validation(t.data, 5):
                    pass
    assert len(records(tmp_path, "evaluation")) == (0 if code else 2)
    assert ("optimizer.step()" in capfd.readouterr().err) == bool(code)


MORE = """
import os, signal, threading
from dataclasses import replace
from pathlib import Path
def baselines(options):
    with Path("calls.txt").open("a") as file: file.write("called\\n")
    {body}
recipe = replace(recipe, baselines=baselines)
"""
ROWS = """return {"constant": {"accuracy": 0.5, "other": float("nan")}, "trees": "left out"}"""


def recipe_with(folder, body):
    return tiny.write_recipe(folder, tiny.RECIPE + MORE.replace("{body}", body))


def measured(folder, body, *flags, monkeypatch, world_size=1):
    monkeypatch.chdir(folder)
    path, recipe = folder / "run", recipe_with(folder, body)
    printed = tiny.trained(recipe, path, "--epochs", "1", *flags, on=world_size)
    return path, read_json(path / "result.json"), printed


def test_baselines_are_measured_once_while_the_other_ranks_wait(tmp_path, monkeypatch):
    body = f"threading.Event().wait(8); {ROWS}"  # longer than a collective may take
    flags = ("--timeout-s", "6")
    path, result, printed = measured(tmp_path, body, *flags, monkeypatch=monkeypatch, world_size=2)
    assert result["baselines"] == {"constant": {"accuracy": 0.5, "other": None}}
    (record,) = tiny.events(path, "baselines")
    assert record["values"]["trees"] == "left out"
    assert (tmp_path / "calls.txt").read_text() == "called\n"
    assert "constant" in printed
    assert "left out" in printed


@pytest.mark.parametrize(
    ("body", "told"), [("return {}['x']", "KeyError"), ("return {'constant': 5}", "metric")]
)
def test_baselines_that_fail_are_told_and_the_run_is_whole(tmp_path, monkeypatch, body, told):
    _, result, printed = measured(tmp_path, body, monkeypatch=monkeypatch)
    assert result["status"] == "completed"
    assert "baselines" not in result
    assert told in printed
    assert "Traceback" not in printed


STOP_ONCE = f"""if not os.path.exists("stopped.txt"):
        Path("stopped.txt").touch()
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait()
    {ROWS}"""


def test_a_signal_does_not_wait_for_baselines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run"
    command = ("--run-dir", str(path), "--epochs", "1")
    ranks = tiny.start(recipe_with(tmp_path, STOP_ONCE), *command, folder=tmp_path / "outputs")
    assert ranks.wait() == [128 + signal.SIGTERM], ranks.output()
    assert read_json(path / "result.json")["status"] == "stopped"
    tiny.resumed(path)
    assert "constant" in read_json(path / "result.json")["baselines"]
