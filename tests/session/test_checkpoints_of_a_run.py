"""What a session keeps of its checkpoints, and when they are announced."""

import errno
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from samestep.base.errors import UserError
from samestep.base.run import checkpoints
from samestep.base.run.checkpoints import FORMAT
from samestep.base.run.files import check_room
from samestep.base.run.index import Retention, remove_unannounced
from samestep.core.session.saver import Saver
from samestep.core.session.session import Session, room_notes, state_bytes
from samestep.core.training.stopping import Watch
from samestep.core.training.work import Position
from samestep.launch.ranks.world import World
from tests.command_line import train_here
from tests.loops.test_going_on import ended
from tests.loops.test_loops import Training
from tests.processes import TIMEOUT_S
from tests.tiny import all_records, last_state, read_index, sha256, write_recipe


@pytest.fixture
def opened(tmp_path):
    """Return a function that opens the run at a step, as a process that goes on does."""
    sessions = []

    def begin(step: int = 0) -> Session:
        for session in sessions:
            session.close()
        session = Session(tmp_path, World(), lambda _: None)
        sessions.append(session)
        session.watch = Watch(metric="loss", mode="min")
        session.begin({"event": "start", "resumed": step > 0}, None, step, session.watch)
        return session

    yield begin
    sessions[-1].close()


def save(session, step, metric=None, keep=None, *, content=None, sync=True) -> None:
    place = Position(step=step, epoch=step // 10, step_in_epoch=step % 10)
    how = {"metric": metric, "watch": session.watch, "retention": Retention(top_k=keep)}
    how |= {"began": time.perf_counter(), "sync": sync}
    session.saver.save(content or {"weights": step}, place, **how)


def told(run: Path) -> list[dict]:
    return [record for record in all_records(run) if record["event"] == "checkpoint"]


@pytest.fixture
def gate(monkeypatch):  # hold every write of a checkpoint back until the test lets it begin
    opened, original = threading.Event(), checkpoints.save

    def save(*args):
        assert opened.wait(60)
        return original(*args)

    monkeypatch.setattr(checkpoints, "save", save)
    return opened


def steps_kept(run: Path) -> list[int]:
    files = {path.name for path in (run / "checkpoints").glob("*.pt")}
    entries = read_index(run)["checkpoints"]
    assert files == {entry["path"] for entry in entries}
    return [entry["step"] for entry in entries]


@pytest.mark.parametrize("sync", [True, False])
def test_a_checkpoint_is_written_named_in_the_index_and_told(opened, tmp_path, sync, monkeypatch):
    session, announced = opened(), []
    place, index = "checkpoints/checkpoint_step_14.pt", tmp_path / "checkpoints" / "index.json"
    monkeypatch.setattr(f"{Saver.__module__}.sync_path", lambda _: announced.append(index.exists()))
    save(session, 14, metric=0.25, sync=sync)
    session.saver.settle_well()
    assert announced == [False], "the records that lead up to it are on the disk before"
    path = tmp_path / place
    (record,) = told(tmp_path)
    assert 0 < record.pop("blocked_seconds") <= record.pop("seconds")
    assert record == {"event": "checkpoint", "step": 14, "path": place, "sha256": sha256(path)}
    index = read_index(tmp_path)
    assert (index["monitor"], index["mode"]) == ("loss", "min")
    entry = {"path": path.name, "step": 14, "epoch": 2, "sha256": sha256(path), "metric": 0.25}
    assert index["last"] == index["best"]
    assert abs(index["last"].pop("time") - time.time()) < TIMEOUT_S
    assert index["last"] == entry


def test_the_training_goes_on_while_a_checkpoint_is_written(opened, tmp_path, gate):
    session, weights = opened(), torch.zeros(4)
    save(session, 10, sync=False, content={"weights": weights})
    weights.add_(1)  # the next step
    session.emit({"event": "step", "step": 11})
    assert not told(tmp_path)
    assert not (tmp_path / "checkpoints" / "index.json").exists()
    gate.set()
    session.saver.writing.thread.join(60)
    session.emit({"event": "step", "step": 12})
    told_of = [record["event"] for record in all_records(tmp_path)]
    assert told_of == ["start", "step", "checkpoint", "step"], "with the next record"
    assert torch.equal(last_state(tmp_path)["weights"], torch.zeros(4))


def test_the_next_checkpoint_waits_for_the_one_before(opened, tmp_path, gate):
    session = opened()
    save(session, 10, sync=False)
    threading.Timer(0.1, gate.set).start()
    save(session, 20, sync=False)
    assert [record["step"] for record in told(tmp_path)] == [10]
    assert told(tmp_path)[0]["seconds"] >= 0.1
    gate.clear()
    threading.Timer(0.1, gate.set).start()
    session.close()
    assert steps_kept(tmp_path) == [10, 20]


def test_a_disk_that_is_full_for_a_while_costs_a_checkpoint(opened, tmp_path, monkeypatch, capsys):
    session, original = opened(), checkpoints.save
    save(session, 10, sync=False)
    session.saver.settle_well()

    def full(*_args):
        raise UserError("The disk is full.") from OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(checkpoints, "save", full)
    monkeypatch.setattr(f"{Saver.__module__}.remove", lambda _: Path("/").unlink())
    for step in (20, 30):
        save(session, step, sync=False)
        session.saver.settle()
    monkeypatch.setattr(checkpoints, "save", original)
    shutil.rmtree(tmp_path / "checkpoints")  # by somebody who wants room
    save(session, 40, sync=False)
    with pytest.raises(UserError):
        session.saver.settle_well()
    assert read_index(tmp_path)["last"]["step"] == 40
    assert capsys.readouterr().err.count("samestep: ") == 1


def test_an_old_one_that_cannot_be_deleted_is_told_once_and_tried_again(opened, tmp_path, capsys):
    session = opened()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *_, **__: Path("/").read_text())
        for step in (10, 20, 30):
            save(session, step, metric=1 / step, keep=1)
        remove_unannounced(tmp_path / "checkpoints", (), 0.0)  # as a resume does
    assert len([*(tmp_path / "checkpoints").glob("*.pt")]) == 3
    assert capsys.readouterr().err.count("samestep: ") == 1
    save(session, 40, metric=0.01, keep=1)
    assert steps_kept(tmp_path) == [40]


def test_an_error_that_no_user_can_mend_ends_the_training(opened, monkeypatch):
    def fail(*_args):
        raise ValueError("a bug")

    session = opened()
    monkeypatch.setattr(checkpoints, "save", fail)
    save(session, 10, sync=False)
    with pytest.raises(ValueError, match="a bug"):
        session.saver.settle()


def test_a_second_checkpoint_leaves_the_announced_one_whole(opened, tmp_path, gate):
    """A run that was stopped in an evaluation saves again where it goes on."""
    gate.set()
    save(opened(), 14)
    session = opened(14)
    gate.clear()
    save(session, 14, sync=False)
    (entry,) = read_index(tmp_path)["checkpoints"]
    assert sha256(tmp_path / "checkpoints" / entry["path"]) == entry["sha256"]
    gate.set()
    session.saver.settle_well()
    (after,) = read_index(tmp_path)["checkpoints"]
    assert after["path"] != entry["path"]
    assert steps_kept(tmp_path) == [14]


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": torch.optim.AdamW,
    "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "adagrad": torch.optim.Adagrad,
    "nadam": torch.optim.NAdam,
    "another": type("SGD", (torch.optim.AdamW,), {}),
}


@pytest.fixture
def free(monkeypatch):
    def set_free(num_bytes):
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=num_bytes))

    return set_free


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_size_is_known_before_the_first_step_and_the_same_after_it(name, tmp_path):
    model = nn.Sequential(nn.Linear(200, 300), nn.BatchNorm1d(300), nn.Linear(300, 10))
    model[2].weight.requires_grad_(False)
    optimizer = OPTIMIZERS[name](model.parameters())
    before = state_bytes([model], [optimizer])
    model(torch.randn(4, 200)).sum().backward()
    optimizer.step()
    content = {"format": FORMAT, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    checkpoints.save(tmp_path, "a.pt", content)
    real = (tmp_path / "a.pt").stat().st_size
    assert before == pytest.approx(real, rel=0.05)
    assert state_bytes([model], [optimizer]) == pytest.approx(before, rel=0.001)


@pytest.mark.parametrize(("fitting", "noted"), [(0, True), (3, True), (4, False), (1000, False)])
def test_only_a_disk_with_room_for_few_checkpoints_is_noted(fitting, noted, free, tmp_path):
    free(fitting * 1000 + 500)
    notes = [*room_notes(tmp_path / "not" / "there", 1000)]
    assert bool(notes) == noted
    if noted and fitting:
        assert "3 checkpoints" in notes[0]


def test_a_write_that_has_no_room_is_refused_and_tied_weights_count_once(free, tmp_path):
    free(90 << 20)
    check_room(tmp_path, 89 << 20)
    with pytest.raises(UserError, match="disk is full") as caught:
        check_room(tmp_path, 90 << 20)
    assert str(tmp_path) in str(caught.value)
    assert "a checkpoint and a margin take 94.4 MB" in str(caught.value)
    model = nn.Sequential(nn.Linear(9, 9, bias=False), nn.Linear(9, 9, bias=False))
    model[1].weight = model[0].weight
    assert state_bytes([model], []) == 9 * 9 * 4


def test_a_training_and_a_loop_of_ones_own_say_so_when_they_start(free, tmp_path, capfd):
    recipe = write_recipe(tmp_path)
    free(4 << 20)
    flags = ("--epochs", "1", "--ema", "0.5", "--hidden", "6000")
    train_here(str(recipe), "--run-dir", str(tmp_path / "run"), *flags)
    free(20)
    with ended(2):  # without room for any, none was written
        Training(tmp_path / "own").train(1)
    for run in (tmp_path / "run", tmp_path / "own"):
        notes = next(record["notes"] for record in all_records(run) if record["event"] == "start")
        assert any("checkpoint takes about" in note for note in notes)
    assert "note: " in capfd.readouterr().err
