"""A checkpoint is copied to the host, and mapped, let go once it is restored."""

import zipfile
from collections import Counter, OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

from samestep.base.errors import UserError
from samestep.base.run import checkpoints, host_copy, index
from samestep.base.run.checkpoints import FORMAT, save
from samestep.base.run.host_copy import HostCopies, on_host
from samestep.base.run.index import Entry
from tests.loops.test_loops import Training
from tests.needs import needs
from tests.processes import run_ranks
from tests.tiny import RECIPE, trained, write_recipe

SMALL = dict.fromkeys(("recipe", "classes", "order", "loss_sums", "schedule", "scaler"))
SMALL |= {"position": {"step": 1, "epoch": 0, "step_in_epoch": 1, "samples": 8}}
SMALL |= {"watch": {"metric": "loss", "mode": "min"}}


def written(folder: Path, **more) -> Entry:
    weight = torch.arange(50_000.0)
    content = {"format": FORMAT, "model": {"w": weight, "tied": weight}, "rng": [weight + 1]}
    content |= {"optimizer": {"state": {0: {"m": weight + 2}}, "param_groups": []}, **SMALL, **more}
    return Entry(path="a.pt", step=1, epoch=1, sha256=save(folder, "a.pt", content))


def mappings(folder: Path) -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if str(folder) in line]


ON_LINUX = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="there is no /proc")


@ON_LINUX
def test_weights_lie_in_the_mapped_file_until_the_content_ends_and_all_else_is_copied(tmp_path):
    content = checkpoints.load(tmp_path, written(tmp_path))
    assert mappings(tmp_path)
    weight = torch.arange(50_000.0)
    assert torch.equal(content["model"]["w"], weight)
    assert content["model"]["w"].data_ptr() == content["model"]["tied"].data_ptr()
    kept = content["rng"]
    own = checkpoints.own_memory(content["optimizer"])
    assert checkpoints.without_tensors(content).keys() == {"format", "rng", *SMALL}
    del content
    assert not mappings(tmp_path)
    (tmp_path / "a.pt").write_bytes(b"")  # what still lay there would be a SIGBUS
    assert torch.equal(kept[0], weight + 1)
    assert torch.equal(own["state"][0]["m"], weight + 2)


def test_what_is_written_to_a_loaded_tensor_stays_there_and_one_tensor_stays_one(tmp_path):
    entry = written(tmp_path)
    checkpoints.load(tmp_path, entry)["model"]["w"].zero_()
    index.verify(tmp_path, entry)
    one = nn.Parameter(torch.ones(2))
    copied = checkpoints.own_memory({"a": one, "b": [one]})
    assert copied["a"] is copied["b"][0]
    assert copied["a"].data_ptr() != one.data_ptr()
    assert copied["a"].requires_grad


def test_a_checkpoint_leaves_out_crcs_and_a_file_that_a_user_saves_does_not(tmp_path):
    entry = written(tmp_path)
    torch.save({"w": torch.ones(3)}, tmp_path / "own.pt")
    with (
        zipfile.ZipFile(tmp_path / entry.path) as ours,
        zipfile.ZipFile(tmp_path / "own.pt") as own,
    ):
        assert ours.testzip() is not None
        assert own.testzip() is None
    for loaded in (torch.load(tmp_path / entry.path), torch.load(tmp_path / entry.path, mmap=True)):
        assert torch.equal(loaded["model"]["w"], torch.arange(50_000.0))


def test_a_file_in_the_old_format_of_torch_is_loaded_without_a_mapping(tmp_path):
    optimizer = {"state": {}, "param_groups": []}
    content = {"format": FORMAT, "model": {"w": torch.ones(3)}, "rng": [], "optimizer": optimizer}
    content |= SMALL
    torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    entry = Entry(path="a.pt", step=1, epoch=1, sha256="")
    found = checkpoints.load(tmp_path, entry, verified=True)
    assert torch.equal(found["model"]["w"], torch.ones(3))


EVERY_4 = '"checkpoint_every_steps": 4,'
LARGER = (
    RECIPE.replace('"epochs": 6', '"epochs": 2')
    .replace('"fp64"', '"fp32", "ema": 0.5, "pictures": False')
    .replace("dtype=torch.float64", "dtype=torch.float32")
)


def mapped_in_training(arguments: list[str], folder: Path) -> tuple[list[str], int]:
    """Train; return the mappings of checkpoints at the first record, and how many were hashed."""
    from samestep.core.session.session import Session
    from samestep.shell.cli import main

    found: list[list[str]] = []
    hashed: list[Path] = []
    begin, sha256_of = Session.begin, index.sha256_of

    def look(self, *args):
        found.append(mappings(folder))
        return begin(self, *args)

    def count(path):
        hashed.append(path)
        return sha256_of(path)

    Session.begin, index.sha256_of = look, count
    assert main(arguments) == 0
    (lines,) = found
    assert not mappings(folder)
    return lines, len(hashed)


LIGHTNING = pytest.param("lightning", marks=[needs("lightning"), pytest.mark.slow])


@ON_LINUX
@pytest.mark.parametrize("engine", ["native", LIGHTNING])
def test_a_resumed_training_has_no_mapping_left_and_rank_0_alone_hashes(tmp_path, engine):
    recipe, run = write_recipe(tmp_path, LARGER), tmp_path / "run"
    if engine == "lightning":
        recipe.write_text(LARGER.replace('"ema": 0.5, ', "").replace(EVERY_4, ""))
    trained(recipe, run, "--max-steps", "5", "--engine", engine)
    words = ["train", str(run), "--resume", "--max-steps", "9"]
    found = run_ranks(mapped_in_training, 2, tmp_path / "output", words, run)
    assert [lines for lines, _ in found] == [[], []]
    assert found[0][1] > 0
    assert found[1][1] == 0


@ON_LINUX
def test_a_resumed_loop_of_ones_own_has_no_mapping_left(tmp_path):
    for epochs in (1, 2):
        loop = Training(tmp_path, resume=True)
        loop.optimizer = torch.optim.Adam(loop.model.parameters(), amsgrad=True)
        with loop.run as run:
            for _ in run.epochs(epochs, state={"model": loop.model, "optimizer": loop.optimizer}):
                assert not mappings(tmp_path)
                for batch in run.batches(loop.data, 5):
                    loop.step(batch)


def test_a_damaged_file_is_named_with_both_hashes_unless_it_is_verified_already(tmp_path):
    entry, other = written(tmp_path), Entry(path="a.pt", step=1, epoch=1, sha256="0" * 64)
    with pytest.raises(UserError) as caught:
        checkpoints.load(tmp_path, other)
    assert entry.sha256[:12] in str(caught.value)
    assert other.sha256[:12] in str(caught.value)
    assert checkpoints.load(tmp_path, other, verified=True)["format"] == FORMAT
    (tmp_path / "a.pt").unlink()
    with pytest.raises(UserError, match="cannot be read"):
        checkpoints.load(tmp_path, entry, verified=True)


@pytest.fixture
def copied(monkeypatch):
    """Let the CPU pass for a GPU: every tensor is copied, and its device waited for."""
    waited = []

    class Stream:
        def synchronize(self):
            waited.append("waited")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: Stream())
    monkeypatch.setattr(host_copy, "_DEVICE", "cpu")
    monkeypatch.setattr(host_copy, "_new_like", lambda tensor, **_: torch.empty_like(tensor))
    return waited


def test_all_tensors_are_copied_once_with_versions_layouts_and_sharing(copied):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(5, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    found = on_host(state)
    assert copied == ["waited"]
    assert found["step"] == 3
    assert found["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
    for name, tensor in state["model"].items():
        assert found["model"][name].data_ptr() != tensor.data_ptr()
        assert torch.equal(found["model"][name], tensor)
    mine, its = found["optimizer"]["state"][0], state["optimizer"]["state"][0]
    assert all(torch.equal(mine[key], its[key]) for key in its)
    last = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    counts = Counter({3: 1})  # as MultiStepLR's milestones
    found = on_host({"a": last, "same": last.detach(), "part": last[:1], "list": [last, counts]})
    assert found["a"].is_contiguous(memory_format=torch.channels_last)
    assert found["same"].data_ptr() == found["a"].data_ptr() == found["list"][0].data_ptr()
    assert found["part"].data_ptr() != found["a"].data_ptr()
    assert torch.equal(found["part"], last[:1])
    assert found["list"][1:] == [counts]
    before = nn.BatchNorm1d(2).state_dict()
    after = on_host(before)
    assert type(after) is OrderedDict
    assert after._metadata == before._metadata
    assert list(after) == list(before)


def test_changes_after_a_copy_do_not_reach_it_and_a_parameter_comes_back():
    state = {"a": torch.ones(3, 4), "b": [torch.ones(3, 4), torch.ones(2)], "steps": [1, 2]}
    copies = HostCopies()
    first = copies.take(state)
    held = {first["a"].data_ptr(), *(t.data_ptr() for t in first["b"])}
    state["a"].add_(1)
    state["steps"].append(3)
    assert torch.equal(first["a"], torch.ones(3, 4))
    assert first["steps"] == [1, 2]
    second = copies.take({**state, "c": torch.zeros(5)})
    assert {second["a"].data_ptr(), *(t.data_ptr() for t in second["b"])} == held
    assert torch.equal(second["a"], state["a"])
    assert torch.equal(second["c"], torch.zeros(5))
    state = {"a": nn.Parameter(torch.ones(2)), "b": torch.ones(2, requires_grad=True)}
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    copied = HostCopies().take({**state, "frozen": frozen})
    assert type(copied["a"]) is type(copied["frozen"]) is nn.Parameter
    assert [copied[name].requires_grad for name in ("a", "b", "frozen")] == [True, True, False]
    assert copied["b"].is_leaf
    state = {"model": nn.Linear(2, 2).state_dict()}
    assert on_host(state) is state
