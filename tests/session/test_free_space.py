"""Before the first step it is known how much a checkpoint takes, and whether there is room."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from samestep import UserError
from samestep.run.checkpoints import FORMAT, save
from samestep.run.files import check_room
from samestep.session.free_space import room_notes, state_bytes
from tests.command_line import train_here
from tests.session.test_going_on import ended
from tests.session.test_loops import Training
from tests.tiny import all_records, write_recipe

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": torch.optim.AdamW,
    "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "adagrad": torch.optim.Adagrad,
    "nadam": torch.optim.NAdam,
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
    save(tmp_path, "a.pt", content)
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
    assert "90.0 MiB" in str(caught.value)
    model = nn.Sequential(nn.Linear(9, 9, bias=False), nn.Linear(9, 9, bias=False))
    model[1].weight = model[0].weight
    assert state_bytes([model], []) == 9 * 9 * 4


def start_notes(run):
    return next(record["notes"] for record in all_records(run) if record["event"] == "start")


def test_a_training_says_so_when_it_starts(free, tmp_path):
    recipe = write_recipe(tmp_path)
    free(4 << 20)
    flags = ("--epochs", "1", "--ema", "0.5", "--hidden", "6000")
    train_here(str(recipe), "--run-dir", str(tmp_path / "run"), *flags)
    assert any("checkpoint takes about" in note for note in start_notes(tmp_path / "run"))


def test_so_does_a_loop_of_ones_own(free, tmp_path, capfd):
    free(20)
    with ended(2):  # without room for any, none was written
        Training(tmp_path).train(1)
    assert any("checkpoint takes about" in note for note in start_notes(tmp_path))
    assert "note: " in capfd.readouterr().err
