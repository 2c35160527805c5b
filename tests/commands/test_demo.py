"""`samestep demo`: what a first visit sees. docs/index.md shows it, and its test runs it whole."""

import dataclasses

import pytest

import samestep
from samestep.commands import demo as demonstration
from tests.api.recipes import made
from tests.command_line import call


@pytest.fixture
def played(monkeypatch, tmp_path):
    """The demo's own steps, with a tiny training in place of each."""
    monkeypatch.chdir(tmp_path)
    recipe = made(settings={"log_every": 1})

    def train(run, **more):
        return samestep.train(recipe, run_dir=run, quiet=True, **more)

    def train_and_kill(run, nproc):
        train(run, epochs=1)
        return demonstration.Killed(path=run, step=8, checkpoint=6, processes=3)

    def resume(run, nproc):
        return samestep.train(run, recipe=recipe, resume=True, epochs=4, quiet=True)

    monkeypatch.setattr(demonstration, "train_whole", train)
    monkeypatch.setattr(demonstration, "train_and_kill", train_and_kill)
    monkeypatch.setattr(demonstration, "resume", resume)
    return monkeypatch


def test_equal_trainings_end_with_0_and_fit_80_columns(played, output_of):
    said = output_of("demo")
    assert max(len(line) for line in said.splitlines() if "runs/demo" not in line) <= 80
    for name in ("runs/demo-whole", "runs/demo-killed"):
        assert name in said


def test_trainings_that_differ_end_with_1(played):
    proof = demonstration.proof
    played.setattr(
        demonstration, "proof", lambda *runs: dataclasses.replace(proof(*runs), verdict="rounding")
    )
    assert call("demo") == 1


def test_an_interrupted_demo_does_not_go_on(played):
    whole = demonstration.train_whole
    played.setattr(demonstration, "train_whole", lambda run: whole(run, epochs=1))
    stopped = samestep.TrainedRun.result.fget

    def result(run):
        return {**stopped(run), "status": "stopped"}

    played.setattr(samestep.TrainedRun, "result", property(result))
    assert call("demo") == 130
