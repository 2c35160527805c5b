"""Runs that earlier versions wrote go on, are evaluated and compared as if they were new."""

import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest

import samestep
from samestep import read_records
from tests.command_line import run
from tests.processes import start_ranks
from tests.tiny import all_records, read_index

KEPT = Path(__file__).parent / "kept"

# Run, step it stopped at, ranks it goes on with, and the loss of the steps of epochs 5 and 6 that
# follow. The version that wrote the runs, resumed in the same way, gave these losses.
GOES_ON = [("0.1-virtual-ranks", 28, 3, [0.6062246561050415, 0.5997543931007385])]
NAMES = [name for name, *_ in GOES_ON]


@pytest.fixture
def copy(tmp_path, request) -> Path:
    return Path(shutil.copytree(KEPT / request.param, tmp_path / request.param))


@pytest.mark.parametrize(
    ("copy", "step", "world_size", "losses"), GOES_ON, indirect=["copy"], ids=NAMES
)
def test_a_kept_run_goes_on_on_another_number_of_ranks(copy, step, world_size, losses, tmp_path):
    before = (copy / "events.jsonl").read_bytes()
    run(
        *("train", str(copy), "--resume", "--epochs", "6", "--max-steps", "42"),
        world_size=world_size,
        folder=tmp_path / "output",
    )
    assert (copy / "events.jsonl").read_bytes().startswith(before)
    written = all_records(copy)[before.count(b"\n") :]
    (resumed,) = (r for r in written if r["event"] == "resume")
    assert (resumed["step"], resumed["problems"]) == (step, [])
    epochs = [r for r in written if r["event"] == "epoch"]
    assert [r["step"] for r in epochs] == [35, 42]
    told = [r["step"] for r in read_records(copy) if r["event"] == "epoch"]
    assert told == sorted({7, 14, 21, 28, step, 35, 42})
    assert [r["loss"] for r in epochs] == pytest.approx(losses, rel=1e-4)
    result = json.loads((copy / "result.json").read_text())
    assert (result["steps"], result["world_size"]) == (42, world_size)
    assert read_index(copy)["last"]["step"] == 42


@pytest.mark.parametrize("copy", ["0.1-own-loop"], indirect=True)
def test_a_kept_run_of_an_own_loop_goes_on_from_its_epoch_on_one_rank(copy, tmp_path):
    script = (copy / "script.py").rename(copy.parent / "own_loop.py")  # as it was called
    ranks = start_ranks(_run_script, 1, tmp_path / "output", str(script), str(copy), "5")
    assert ranks.wait() == [0], ranks.output()
    epochs = [r for r in read_records(copy) if r["event"] == "epoch"]
    assert [r["step"] for r in epochs] == [8, 16, 24, 32, 40]
    losses = [r["loss"] for r in epochs[3:]]  # on three ranks, by the version that wrote it:
    assert losses == pytest.approx([1.944101503988107, 1.8807668705781302], rel=1e-4)


def _run_script(*words: str) -> None:
    sys.argv[:] = words
    runpy.run_path(words[0], run_name="__main__")


@pytest.mark.parametrize("copy", NAMES, indirect=True)
@pytest.mark.parametrize("checkpoint", ["last", "best"])
def test_a_checkpoint_of_a_kept_run_is_evaluated_as_it_was(copy, checkpoint):
    measured = samestep.evaluate(copy, checkpoint, split="validation")
    step = read_index(copy)[checkpoint]["step"]
    wanted = ("evaluation", "validation", step)
    told = [r for r in read_records(copy) if (r["event"], r.get("split"), r.get("step")) == wanted]
    (recorded,) = told
    for key in ("loss", "accuracy"):
        assert measured[key] == pytest.approx(recorded[key], rel=1e-5)
