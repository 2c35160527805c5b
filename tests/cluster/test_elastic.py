"""A job of 1 to 2 nodes takes what is there at each start, and trains what one process trains."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.jobs import Submitted, set_pace, submit
from tests.cluster.sandbox import RunningSandbox, wait_for
from tests.command_line import read_json

# 120 samples, 60 steps; dropout and BatchNorm compute with what lies on one virtual rank.
RECIPE = """
import time
from pathlib import Path
import torch
from torch import nn
from samestep import Recipe, Splits

PACE = Path("pace").absolute()

def data():
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(150, 8, generator=generator)
    y = (x[:, 0] * x[:, 1] > 0).long()
    return Splits(train=(x[:120], y[:120]), validation=(x[120:], y[120:]))

def model():
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3),
                         nn.Linear(32, 2))

def loss(outputs, targets):
    if PACE.exists() and outputs.requires_grad:
        time.sleep(float(PACE.read_text()))  # a model as slow to train as the test wants it
    return nn.functional.cross_entropy(outputs, targets)

recipe = Recipe(model=model, data=data, loss=loss,
                settings={"epochs": 6, "batch_size": 12, "log_every": 1, "seed": 3})
"""
TRAINS = ("--virtual-ranks", "4", "--checkpoint-every-steps", "2")


@pytest.fixture(scope="module")
def of_one_process(tmp_path_factory) -> dict[str, Any]:
    """The result of the same training in one process on this machine."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "tiny.py").write_text(RECIPE)
    subprocess.run(
        [sys.executable, "-m", "samestep", "train", "tiny.py", "--run-dir", "run", *TRAINS],
        cwd=folder,
        check=True,
        timeout=90,
    )
    return read_json(folder / "run" / "result.json")


@contextmanager
def without(sandbox: RunningSandbox, node: str) -> Iterator[None]:
    """Take a node away from the jobs that start meanwhile."""
    update = ("scontrol", "update", f"NodeName={node}")
    sandbox.run(*update, "State=DRAIN", "Reason=test")
    try:
        yield
    finally:
        sandbox.run(*update, "State=RESUME")


def requeue(job: Submitted) -> None:
    """Let a job start again, and wait until it has taken two steps more."""
    before = len(starts(job))
    job.sandbox.run("scontrol", "requeue", job.job)
    wait_for(lambda: len(starts(job)) > before, within_s=90)
    begun = [record["event"] for record in job.all_records()].count("step")
    wait_for(lambda: [r["event"] for r in job.all_records()].count("step") >= begun + 2)


def starts(job: Submitted) -> list[dict[str, Any]]:
    return [record for record in job.all_records() if record["event"] == "start"]


@pytest.mark.timeout(600)
def test_a_job_loses_a_node_and_gets_it_back_with_the_weights_of_one_process(
    sandbox, tmp_path: Path, of_one_process
):
    (tmp_path / "tiny.py").write_text(RECIPE)
    set_pace(tmp_path, 0.3)
    size = ("--nodes", "1-2", "--ntasks-per-node", "2")
    job = submit(sandbox, tmp_path, "tiny.py", *size, "--", *TRAINS)
    job.wait_for_step(4)
    with without(sandbox, "node2"):
        requeue(job)
    requeue(job)
    set_pace(tmp_path, None)
    job.wait("COMPLETED", within_s=120)
    ranks = [(start["num_nodes"], start["world_size"]) for start in starts(job)]
    assert ranks == [(2, 4), (1, 2), (2, 4)]
    assert [step for step, _ in job.losses()] == list(range(1, of_one_process["steps"] + 1))
    assert job.result()["weights_sha256"] == of_one_process["weights_sha256"]
