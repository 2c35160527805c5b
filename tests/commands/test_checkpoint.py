"""`samestep checkpoint` as a user runs it: list, verify, export."""

import json
import shutil
import sys

import pytest
import torch
from torch import nn

import samestep
from samestep.base.run.checkpoints import FORMAT, save
from samestep.base.run.index import Entry, Index, Retention, announce
from tests.command_line import call, train_here
from tests.needs import needs
from tests.reporting.made_runs import write_run
from tests.tiny import RECIPE, read_index, write_recipe
from tests.tiny import train as start_training

SAFETENSORS = needs("safetensors")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with an average, whose second checkpoint of three is the best."""
    folder = tmp_path_factory.mktemp("trained")
    recipe = write_recipe(folder, RECIPE.replace('"checkpoint_every_steps": 4,', ""))
    train_here(str(recipe), "--run-dir", str(folder / "run"), "--epochs", "3", "--ema", "0.9")
    return folder / "run"


def printed(capfd, *arguments, code=0):
    assert call("checkpoint", *map(str, arguments)) == code
    return capfd.readouterr().out


@pytest.fixture
def refuse(refused):
    return lambda *words: refused("checkpoint", *map(str, words))


def test_the_list_has_what_the_index_says_and_marks_the_best_and_the_last(trained, capfd):
    index = read_index(trained)
    found = json.loads(printed(capfd, "list", trained, "--json"))
    folder = trained / "checkpoints"
    for row, entry in zip(found, index["checkpoints"], strict=True):
        assert {name: row[name] for name in entry} == entry
        assert row["bytes"] == (folder / entry["path"]).stat().st_size
        assert row["best"] == (entry == index["best"])
        assert row["last"] == (entry == index["last"])
    lines = printed(capfd, "list", trained).splitlines()
    assert [line.split()[0] for line in lines[1:]] == [row["path"] for row in found]
    assert [line.split()[0] for line in lines if "best" in line] == [index["best"]["path"]]


def test_a_run_without_checkpoints_has_an_empty_list_and_no_run_is_refused(tmp_path, capfd, refuse):
    run = write_run(tmp_path / "run")
    assert json.loads(printed(capfd, "list", run, "--json")) == []
    assert printed(capfd, "list", run)
    assert printed(capfd, "verify", run)
    for words in (("list",), ("verify",), ("export", "-o", tmp_path / "a.pt")):
        assert str(tmp_path) in refuse(*words, tmp_path)


@pytest.mark.parametrize("how", ["changed", "cut", "missing"])
def test_verify_names_what_is_damaged_and_it_is_not_exported(trained, tmp_path, capfd, refuse, how):
    copy = shutil.copytree(trained, tmp_path / "run")
    assert printed(capfd, "verify", copy)
    damaged = copy / "checkpoints" / "checkpoint_epoch_2.pt"
    content = bytearray(damaged.read_bytes())
    content[-40] ^= 1
    damaged.unlink()
    if how != "missing":
        damaged.write_bytes(content if how == "changed" else content[:-1])
    found = json.loads(printed(capfd, "verify", copy, "--json", code=1))
    assert [one["path"] for one in found if one["problem"]] == [damaged.name]
    assert len(found) == 3
    assert str(damaged) in printed(capfd, "verify", copy, code=1)
    rows = json.loads(printed(capfd, "list", copy, "--json"))
    assert [row["path"] for row in rows if row["bytes"] is None] == [damaged.name] * (
        how == "missing"
    )
    words = ("export", copy, "-o", tmp_path / "w.pt", "--checkpoint", damaged.stem)
    assert str(damaged) in refuse(*words)
    assert not (tmp_path / "w.pt").exists()


@pytest.mark.parametrize(
    ("name", "checkpoint"),
    [
        ("w.pt", "best"),
        ("w.pt", "checkpoint_epoch_1.pt"),
        pytest.param("w.safetensors", "last", marks=SAFETENSORS),
    ],
)
def test_the_exported_weights_are_those_evaluated(trained, tmp_path, capfd, name, checkpoint):
    file = tmp_path / name
    words = ("export", trained, file, "--checkpoint", checkpoint, "--json")
    told = json.loads(printed(capfd, *words))
    assert told["bytes"] == file.stat().st_size
    if name.endswith(".pt"):
        found = torch.load(file, weights_only=True)
    else:
        from safetensors.torch import load_file

        found = load_file(file)
    model = samestep.load(trained, checkpoint)  # its average
    wanted = model.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert told["tensors"] == len(wanted)
    content = torch.load(trained / "checkpoints" / told["checkpoint"], weights_only=True)
    assert not torch.equal(found["0.weight"], content["model"]["0.weight"])


def test_what_is_there_is_kept_unless_forced(trained, tmp_path, capfd, refuse, monkeypatch):
    file = tmp_path / "w.pt"
    file.write_text("mine")
    assert "--force" in refuse("export", trained, "-o", file)
    for words in ((), (file, "-o", file)):
        assert "Name one file" in refuse("export", trained, *words)
    assert file.read_text() == "mine"
    printed(capfd, "export", trained, "-o", file, "--force")
    announced = next((trained / "checkpoints").glob("*.pt"))
    assert "checkpoints" in refuse("export", trained, "-o", announced, "--force")
    assert torch.load(file, weights_only=True)
    for name in ("model.onnx", "model", "nowhere/model.pt"):
        assert name in refuse("export", trained, "-o", tmp_path / name)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    said = refuse("export", trained, "-o", tmp_path / "w.safetensors")
    assert "pip install 'samestep[safetensors]'" in said
    assert [path.name for path in tmp_path.iterdir()] == ["w.pt"]


class Told(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 3)
        self.same = self.inner.weight

    def get_extra_state(self):
        return {"seen": 3}

    def set_extra_state(self, state):
        pass


def own_run(folder, **state):
    run = write_run(folder / "run")
    (run / "checkpoints").mkdir()
    held = {name: one.state_dict() for name, one in state.items()}
    position = {"step": 1, "epoch": 1, "step_in_epoch": 0, "samples": 1}
    content = {part: {} for part in ("program", "settings", "order", "sums", "own")}
    content |= {"format": FORMAT, "state": held, "position": position}
    digest = save(run / "checkpoints", "checkpoint_epoch_1.pt", content)
    entry = Entry(path="checkpoint_epoch_1.pt", step=1, epoch=1, sha256=digest)
    announce(run / "checkpoints", Index(), entry, Retention())
    return run


def test_the_one_module_of_a_loop_of_ones_own_has_its_own_names(tmp_path):
    model = nn.Linear(2, 3)
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    run = own_run(tmp_path, model=model, optimizer=optimizer, schedule=schedule)
    samestep.export(run, tmp_path / "w.pt")
    model.load_state_dict(torch.load(tmp_path / "w.pt", weights_only=True))
    assert samestep.export(run, tmp_path / "x.pth")["tensors"] == 2


@SAFETENSORS
def test_several_modules_have_their_names_in_front_and_tied_weights_are_written_twice(tmp_path):
    from safetensors import safe_open

    told, other = Told(), nn.Linear(2, 2)
    run = own_run(tmp_path, told=told, other=other)
    found = samestep.export(run, tmp_path / "w.safetensors")
    assert found["left_out"] == ["told._extra_state"]
    with safe_open(tmp_path / "w.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        names = {*file.keys()}
        assert names == {
            *("told.same", "told.inner.weight", "told.inner.bias", "other.weight", "other.bias")
        }
        assert torch.equal(file.get_tensor("told.same"), told.inner.weight)
        assert torch.equal(file.get_tensor("told.inner.weight"), told.inner.weight)
    samestep.export(run, tmp_path / "w.pt")
    kept = torch.load(tmp_path / "w.pt", weights_only=True)
    assert kept["told._extra_state"] == {"seen": 3}
    for part in (None, "other"):
        found = samestep.load(run, model=nn.Linear(2, 2), part=part)
        assert torch.equal(found.weight, other.weight)
    for part, words in ((None, "'told'"), ("other", "weight has shape"), ("loss", "told, other")):
        with pytest.raises(samestep.UserError, match=words):
            samestep.load(run, model=nn.Linear(2, 5), part=part)


def test_a_sharded_checkpoint_is_listed_verified_and_exported_whole(tmp_path, capfd):
    recipe = write_recipe(tmp_path, RECIPE.replace('"checkpoint_every_steps": 4,', ""))
    run = tmp_path / "run"
    flags = ("--run-dir", str(run), "--max-steps", "2", "--strategy", "fsdp")
    start_training(recipe, *flags, world_size=2, folder=tmp_path)
    (row,) = json.loads(printed(capfd, "list", run, "--json"))
    files = {path.name: path for path in (run / "checkpoints").rglob("*") if path.is_file()}
    del files["index.json"]
    assert row["bytes"] == sum(path.stat().st_size for path in files.values())
    printed(capfd, "verify", run)
    printed(capfd, "export", run, "-o", tmp_path / "w.pt")
    found = torch.load(tmp_path / "w.pt", weights_only=True)
    wanted = samestep.load(run).state_dict()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    part = files["__1_0.distcp"]
    part.write_bytes(part.read_bytes()[:-1])
    (one,) = json.loads(printed(capfd, "verify", run, "--json", code=1))
    assert str(part) in one["problem"]
