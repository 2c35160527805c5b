"""A job of 1 to 2 nodes takes what is there at each start, and trains what one process trains."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from tests.cluster.jobs import RECIPE, Submitted, samestep, set_pace, submit, write_recipe
from tests.cluster.nodes import kill_node, start_node
from tests.cluster.sandbox import RunningSandbox, wait_for
from tests.cluster.test_survival import starts
from tests.command_line import read_json

# Dropout and BatchNorm compute with what lies on one virtual rank.
BESIDE = """
from torch import nn
def net():
    return nn.Sequential(
        nn.Linear(4, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 2))
"""
TRAINS = (
    *("--virtual-ranks", "4", "--checkpoint-every-steps", "2"),
    *("--batch-size", "12", "--epochs", "6"),
)


@contextmanager
def without(sandbox: RunningSandbox, node: str) -> Iterator[None]:
    update = ("scontrol", "update", f"NodeName={node}")
    sandbox.run(*update, "State=DRAIN", "Reason=test")
    try:
        yield
    finally:
        sandbox.run(*update, "State=RESUME")


def requeue(job: Submitted) -> None:
    before = starts(job)
    job.sandbox.run("scontrol", "requeue", job.job)
    wait_for(lambda: starts(job) > before)
    begun = [record["event"] for record in job.all_records()].count("step")
    wait_for(lambda: [r["event"] for r in job.all_records()].count("step") >= begun + 2)


def test_a_job_loses_a_node_and_gets_it_back_with_the_weights_of_one_process(sandbox, tmp_path):
    recipe, beside = tmp_path / "tiny.py", tmp_path / "beside.py"
    recipe.write_text(RECIPE.replace("nn.Linear(4, 2)", "__import__('beside').net()"))
    beside.write_text(BESIDE)
    done = samestep(sandbox, tmp_path, "train", "tiny.py", "--run-dir", "alone", *TRAINS)
    assert done.returncode == 0, done.stderr
    alone = read_json(tmp_path / "alone" / "result.json")
    set_pace(tmp_path, 0.3)
    size = ("--nodes", "1-2", "--ntasks-per-node", "2")
    job = submit(sandbox, tmp_path, "tiny.py", *size, "--", *TRAINS)
    beside.write_text(BESIDE.replace("ReLU", "Tanh"))
    recipe.write_text(recipe.read_text().replace('"seed": 3', '"seed": 4'))
    job.wait_for_step(2)
    recipe.write_text("recipe = None\n")
    with without(sandbox, "node2"):
        requeue(job)
    requeue(job)
    set_pace(tmp_path, None)
    job.wait("COMPLETED")
    begun = [record for record in job.all_records() if record["event"] == "start"]
    sizes = [(start["num_nodes"], start["world_size"]) for start in begun]
    assert sizes == [(2, 4), (1, 2), (2, 4)]
    assert [step for step, _ in job.losses()] == list(range(1, alone["steps"] + 1))
    assert job.result()["weights_sha256"] == alone["weights_sha256"]


def test_a_job_outlives_a_rank_and_a_node_and_has_the_weights_of_one_process(sandbox, tmp_path):
    write_recipe(tmp_path)
    alone = samestep(sandbox, tmp_path, "train", "tiny.py", "--run-dir", "alone", *TRAINS[:2])
    assert alone.returncode == 0, alone.stderr
    set_pace(tmp_path, 0.3)
    two = ("--nodes", "2", "--ntasks-per-node", "1", "--elastic")
    job = submit(sandbox, tmp_path, "tiny.py", *two, "--", *TRAINS[:2])
    job.wait_for_step(2)
    os.kill(job.processes("SAMESTEP_MEMBER")[0], signal.SIGKILL)
    wait_for(lambda: "1 rank joined: 2 ranks" in job.log)
    kill_node(sandbox.folder, "node2")
    try:
        wait_for(lambda: "on node2: 1 rank from step" in job.log)
        set_pace(tmp_path, None)
        job.wait("COMPLETED")
    finally:
        start_node(sandbox.folder, "node2")
    whole = read_json(tmp_path / "alone" / "result.json")
    assert job.result()["weights_sha256"] == whole["weights_sha256"]
    assert [step for step, _ in job.losses()] == list(range(1, whole["steps"] + 1))
    sizes = [record["world_size"] for record in job.all_records() if record["event"] == "regroup"]
    assert sizes == [1, 2, 1]
    assert starts(job) == 1
