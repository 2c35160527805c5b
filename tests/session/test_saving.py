"""What writes a run's checkpoints: each is announced with its hash, and superseded ones go."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from samestep.ranks.world import World
from samestep.session.saving import make_writer
from samestep.settings import Settings
from samestep.training.work import Position
from tests.tiny import read_index, sha256


@pytest.fixture
def run(tmp_path) -> Path:
    (tmp_path / "checkpoints").mkdir()
    return tmp_path


def state_at(step: int) -> SimpleNamespace:
    return SimpleNamespace(
        position=Position(step=step), watch=SimpleNamespace(metric="loss", mode="min")
    )


def work(keep_top_k: int | None = None) -> SimpleNamespace:
    return SimpleNamespace(world=World(), settings=Settings(epochs=1, keep_top_k=keep_top_k))


def save(write, state, step: int, metric: float | None = None):
    state.position.step = step
    content = {"position": {"epoch": step // 10}}
    return write(f"checkpoint_step_{step}.pt", metric, content)


def steps_kept(run: Path) -> list[int]:
    files = {path.name for path in (run / "checkpoints").glob("*.pt")}
    entries = read_index(run)["checkpoints"]
    assert files == {entry["path"] for entry in entries}
    return [entry["step"] for entry in entries]


def test_a_checkpoint_is_written_named_in_the_index_and_told_with_its_hash(run):
    state = state_at(0)
    record = save(make_writer(work(), state, run), state, 14, metric=0.25)
    path = run / "checkpoints" / "checkpoint_step_14.pt"
    assert record == {
        "event": "checkpoint",
        "step": 14,
        "path": "checkpoints/checkpoint_step_14.pt",
        "sha256": sha256(path),
    }
    index = read_index(run)
    assert (index["monitor"], index["mode"]) == ("loss", "min")
    assert index["last"] == index["best"]
    assert index["last"] == {
        "path": path.name,
        "step": 14,
        "epoch": 1,
        "sha256": sha256(path),
        "metric": 0.25,
    }


def test_the_last_and_the_best_are_kept(run):
    state = state_at(0)
    write = make_writer(work(keep_top_k=1), state, run)
    for step, metric in ((10, 0.5), (20, 0.1), (30, 0.9), (40, None)):
        save(write, state, step, metric)
    assert steps_kept(run) == [20, 40]
    assert read_index(run)["best"]["step"] == 20


def test_a_run_that_goes_on_from_an_earlier_step_forgets_the_later_ones(run):
    """They were damaged, and their steps are trained again."""
    state = state_at(0)
    write = make_writer(work(), state, run)
    for step in (10, 20, 30):
        save(write, state, step)
    state = state_at(10)
    save(make_writer(work(), state, run), state, 15)
    assert [entry["step"] for entry in read_index(run)["checkpoints"]] == [10, 15]
