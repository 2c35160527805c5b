"""What a session keeps of its checkpoints: each is announced with its hash, superseded ones go."""

from pathlib import Path

import pytest

from samestep.ranks.world import World
from samestep.session.session import Session
from samestep.training.stopping import Watch
from samestep.training.work import Position
from tests.tiny import read_index, sha256


@pytest.fixture
def opened(tmp_path):
    """Return a function that opens the run at a step, as a process that goes on does."""
    sessions = []

    def begin(step: int = 0, metric: str = "loss") -> Session:
        for session in sessions:
            session.close()
        session = Session(tmp_path, World(), lambda _: None)
        sessions.append(session)
        session.watch = Watch(metric=metric, mode="min")
        session.begin({"event": "start", "resumed": step > 0}, None, step, session.watch)
        return session

    yield begin
    sessions[-1].close()


def save(session: Session, step: int, metric: float | None = None, keep: int | None = None):
    position = Position(step=step, epoch=step // 10, step_in_epoch=step % 10)
    return session.save(
        {"weights": step}, position, metric=metric, watch=session.watch, keep_top_k=keep
    )


def steps_kept(run: Path) -> list[int]:
    files = {path.name for path in (run / "checkpoints").glob("*.pt")}
    entries = read_index(run)["checkpoints"]
    assert files == {entry["path"] for entry in entries}
    return [entry["step"] for entry in entries]


def test_a_checkpoint_is_written_named_in_the_index_and_told_with_its_hash(opened, tmp_path):
    record = save(opened(), 14, metric=0.25)
    path = tmp_path / "checkpoints" / "checkpoint_step_14.pt"
    assert record == {
        "event": "checkpoint",
        "step": 14,
        "path": "checkpoints/checkpoint_step_14.pt",
        "sha256": sha256(path),
    }
    index = read_index(tmp_path)
    assert (index["monitor"], index["mode"]) == ("loss", "min")
    entry = {"path": path.name, "step": 14, "epoch": 2, "sha256": sha256(path), "metric": 0.25}
    assert index["last"] == index["best"] == entry


def test_the_last_and_the_best_are_kept(opened, tmp_path):
    session = opened()
    for step, metric in ((10, 0.5), (20, 0.1), (30, 0.9), (40, None)):
        save(session, step, metric, keep=1)
    assert steps_kept(tmp_path) == [20, 40]
    assert read_index(tmp_path)["best"]["step"] == 20


def test_a_run_that_goes_on_from_an_earlier_step_forgets_the_later_ones(opened, tmp_path):
    """They were damaged, and their steps are trained again."""
    session = opened()
    for step in (10, 20, 30):
        save(session, step)
    save(opened(10), 15)
    assert [entry["step"] for entry in read_index(tmp_path)["checkpoints"]] == [10, 15]


def test_with_another_metric_to_watch_no_earlier_checkpoint_counts_as_best_or_is_deleted(
    opened, tmp_path
):
    save(opened(), 10, metric=0.1)
    session = opened(10, metric="error")
    for step, metric in ((20, 0.7), (30, 0.9)):
        save(session, step, metric, keep=1)
    assert steps_kept(tmp_path) == [10, 20, 30]
    assert read_index(tmp_path)["best"]["step"] == 20
