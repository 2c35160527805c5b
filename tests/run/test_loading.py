"""Loading reads a file once, and nothing that stays in use lies in the file."""

from pathlib import Path

import pytest
import torch
from torch import nn

import samestep
from samestep.errors import UserError
from samestep.run import checkpoints
from samestep.run.index import Entry
from samestep.run.loading import copied, load
from tests.command_line import train_here

RECIPE = """
from pathlib import Path

import torch
from torch import nn
from samestep import Recipe, Splits

def data():
    x = torch.randn(24, 300)
    return Splits(train=(x, x[:, :1]), validation=(x[:8], x[:8, :1]))

def model():
    return nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 1))

def loss(outputs, targets):
    assert "checkpoints/" not in Path("/proc/self/maps").read_text()
    return nn.functional.mse_loss(outputs, targets)

recipe = Recipe(model=model, data=data, loss=loss, settings={
    "epochs": 1, "batch_size": 8, "lr": 0.01, "optimizer": "adamw", "ema": 0.9,
})
"""


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("checkpoints/")


@pytest.mark.parametrize("engine", ["native", "lightning"])
def test_once_a_training_goes_on_no_tensor_of_it_lies_in_the_checkpoint_file(tmp_path, engine):
    """The file may be deleted then, which a network file system answers by SIGBUS."""
    if engine == "lightning":
        pytest.importorskip("lightning")
    recipe, run = tmp_path / "large.py", tmp_path / "run"
    recipe.write_text(RECIPE)
    flags = ("--engine", engine) + (("--ema", "0.9") if engine == "native" else ())
    if engine == "lightning":
        recipe.write_text(RECIPE.replace(', "ema": 0.9', ""))
    train_here(str(recipe), "--run-dir", str(run), *flags)
    train_here(str(run), "--resume", "--epochs", "2")
    assert not mapped()


def test_a_loaded_model_does_not_lie_in_the_checkpoint_file(tmp_path):
    recipe, run = tmp_path / "large.py", tmp_path / "run"
    recipe.write_text(RECIPE)
    train_here(str(recipe), "--run-dir", str(run))
    model = samestep.load(run)
    assert not mapped()
    assert sum(p.numel() for p in model.parameters()) == 300 * 301 + 301


def written(folder: Path, state: dict) -> Entry:
    digest = checkpoints.save(folder, "a.pt", {"format": 1, **state})
    return Entry(path="a.pt", step=1, epoch=1, sha256=digest)


def test_large_tensors_stay_in_the_file_until_they_are_copied(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    entry = written(folder, {"large": torch.ones(1 << 18), "small": torch.ones(4)})
    found = load(folder, entry)
    assert mapped()
    kept = copied(found)
    del found
    assert not mapped()
    assert torch.equal(kept["large"], torch.ones(1 << 18))
    assert torch.equal(kept["small"], torch.ones(4))


def test_writing_to_what_was_loaded_does_not_change_the_file(tmp_path):
    entry = written(tmp_path, {"weight": torch.ones(1 << 18)})
    load(tmp_path, entry)["weight"].zero_()
    assert torch.equal(load(tmp_path, entry)["weight"], torch.ones(1 << 18))


def test_an_optimizer_of_the_users_own_gets_memory_of_its_own(tmp_path):
    """torch.optim keeps the tensors that it is given."""
    from samestep.session.own_state import load_one

    folder = tmp_path / "checkpoints"
    folder.mkdir()
    model = nn.Linear(600, 600)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(600)).sum().backward()
    optimizer.step()
    entry = written(folder, {"optimizer": optimizer.state_dict()})
    found = load(folder, entry)
    load_one("optimizer", optimizer, found["optimizer"])
    del found
    assert not mapped()


@pytest.mark.parametrize("content", [b"", b"torn"])
def test_a_file_that_cannot_be_mapped_is_refused_in_words_also_without_its_hash(tmp_path, content):
    entry = written(tmp_path, {})
    (tmp_path / "a.pt").write_bytes(content)
    for verify in (True, False):
        with pytest.raises(UserError):
            load(tmp_path, entry, verify=verify)


def test_a_missing_file_is_refused_in_words(tmp_path):
    entry = written(tmp_path, {})
    (tmp_path / "a.pt").unlink()
    for verify in (True, False):
        with pytest.raises(UserError):
            load(tmp_path, entry, verify=verify)
