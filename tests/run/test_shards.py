"""Sharded tensors: written by any number of ranks, read by any other, and never run."""

import errno
import hashlib
import io
import pickle
import shutil
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from samestep.base.errors import UserError
from samestep.base.run import shards
from samestep.base.run.files import write_text
from samestep.base.run.host_copy import HostCopies
from tests.processes import run_ranks

# Ranks are started once for all of them.
pytestmark = pytest.mark.xdist_group("shards")

ROWS = {"model": (7, 3), "bias": (5,), "few": (2, 2)}


def the_state() -> dict:
    generator = torch.Generator().manual_seed(3)
    made = {name: torch.randn(shape, generator=generator) for name, shape in ROWS.items()}
    model = OrderedDict({"0.weight": made["model"].double(), "0.bias": made["bias"]})
    model._metadata = {"": {"version": 1}}
    states = {0: {"step": torch.tensor(4.0), "exp_avg": made["few"].bfloat16()}}
    return {"format": 1, "model": model, "optimizer": {"state": states, "groups": [{"lr": 0.1}]}}


def mesh_of(dims: tuple[int, ...]):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", dims, mesh_dim_names=("replicate", "shard")[-len(dims) :])


def sharded(state: dict, dims: tuple[int, ...]) -> dict:
    """Return the state with its matrices and vectors sharded over a mesh."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = mesh_of(dims)
    places = [Replicate()] * (len(dims) - 1) + [Shard(0)]

    def shard(_path: str, leaf):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return distribute_tensor(leaf, mesh, places)
        return leaf

    return shards.map_state(shard, state)


def write(folder: Path, dims: tuple[int, ...]) -> dict:
    """Write the state from all ranks, as from copies; return its hashes and what stays beside."""
    import torch.distributed as dist

    content, parts = shards.split(sharded(the_state(), dims))
    copied = shards.with_parts(parts, HostCopies().take(shards.local_parts(parts)))
    hashes = shards.write(folder, copied, dist.group.WORLD)
    if dist.get_rank() == 0:
        torch.save(content, folder.with_suffix(".pt"))
    dist.barrier()
    return hashes


def parts_of(state: dict) -> dict:
    """Return each part of a state by its path; of what is sharded this rank's rows, and where."""
    from torch.distributed.tensor import DTensor

    found = {}

    def note(path: str, leaf):
        if isinstance(leaf, DTensor):
            found[path] = (leaf.placements, leaf.shape, leaf.dtype, leaf.to_local().tolist())
        elif isinstance(leaf, torch.Tensor):
            found[path] = (leaf.dtype, leaf.tolist())
        else:
            found[path] = leaf

    shards.map_state(note, state)
    return found


def read(folder: Path, dims: tuple[int, ...]) -> bool:
    """Read it on these ranks; return whether each part is that of the state."""
    content = torch.load(folder.with_suffix(".pt"), weights_only=True)
    found = shards.read(folder, content, mesh_of(dims))
    return parts_of(found) == parts_of(sharded(the_state(), dims))


def read_and_write(reads: list[tuple], writes: tuple | None = None) -> tuple[list[bool], dict]:
    """Read folders over meshes of these ranks, then write one; return what was good, and hashes."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    good = [read(folder, dims) for folder, dims in reads]
    hashes = write(*writes) if writes else {}
    dist.barrier()
    dist.destroy_process_group()
    return good, hashes


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory) -> SimpleNamespace:
    """What 3 ranks wrote and 4 read, then these on a mesh of 2 x 2, and what 2 read of both."""
    base = tmp_path_factory.mktemp("shards")
    three, four = base / "three", base / "four"
    by_three = run_ranks(read_and_write, 3, base / "out-3", [], (three, (3,)))
    reads = [(three, (4,)), (three, (2, 2))]
    by_four = run_ranks(read_and_write, 4, base / "out-4", reads, (four, (2, 2)))
    by_two = run_ranks(read_and_write, 2, base / "out-2", [(three, (2,)), (four, (2,))])
    told = {
        folder: [hashes for _, hashes in by] for folder, by in ((three, by_three), (four, by_four))
    }
    return SimpleNamespace(folder=three, told=told, good=[good for good, _ in (*by_four, *by_two)])


def test_one_process_reads_whole_tensors_and_other_ranks_their_parts_by_the_hashes_told(on_ranks):
    for folder in on_ranks.told:
        content = torch.load(folder.with_suffix(".pt"), weights_only=True)
        found, expected = shards.read(folder, content, None), the_state()
        assert found["model"]._metadata == expected["model"]._metadata
        assert all(torch.equal(found["model"][k], v) for k, v in expected["model"].items())
        mine, its = (one["optimizer"]["state"][0] for one in (found, expected))
        assert all(torch.equal(mine[key], its[key]) for key in its)
        assert found["optimizer"]["groups"] == expected["optimizer"]["groups"]
    assert on_ranks.good == [[True, True]] * 6
    for folder, told in on_ranks.told.items():
        hashes = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}
        assert told == [hashes] * len(told)
        shards.verify(folder, hashes)


@pytest.fixture
def damaged(on_ranks, tmp_path) -> tuple[Path, dict[str, str]]:
    folder = shutil.copytree(on_ranks.folder, tmp_path / "parts")
    return folder, on_ranks.told[on_ranks.folder][0]


@pytest.mark.parametrize("how", ["missing", "changed", "cut"])
def test_a_damaged_part_is_named_with_its_rank_and_first_parameter(damaged, how):
    folder, hashes = damaged
    path = folder / "__1_0.distcp"
    content = path.read_bytes()
    path.unlink()
    if how != "missing":
        path.write_bytes(content[:-9] if how == "cut" else content[:-1] + b"?")
    with pytest.raises(UserError) as caught:
        shards.verify(folder, hashes)
    message = str(caught.value)
    assert str(path) in message
    assert "rank 1" in message
    assert "model.0" in message or "optimizer.state" in message


class _Trap:
    def __reduce__(self):
        return Path.touch, (Path("sprung"),)


def test_code_in_the_index_is_not_run(damaged, monkeypatch, tmp_path):
    folder, _ = damaged
    monkeypatch.chdir(tmp_path)
    (folder / ".metadata").write_bytes(pickle.dumps(_Trap()))
    with pytest.raises(UserError):
        shards.read(folder, {"w": "in shards: float32 2"}, None)
    assert not Path("sprung").exists()
    pickle.loads((folder / ".metadata").read_bytes())  # the trap does spring elsewhere
    assert Path("sprung").exists()


def test_parts_that_are_pickled_or_outside_the_folder_or_not_there_are_refused(damaged):
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    folder, _ = damaged
    with pytest.raises(UserError, match="cannot be loaded"):
        shards.read(folder, {"w": "in shards: float32 2"}, None)
    pickled, outside = (pickle.loads((folder / ".metadata").read_bytes()) for _ in range(2))
    pickled.state_dict_metadata["w"] = BytesStorageMetadata()
    for place in outside.storage_data.values():
        place.relative_path = "../elsewhere"
    for metadata, told in ((pickled, "safely"), (outside, "not an index of tensors")):
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(UserError, match=told):
            shards.read(folder, {"w": "in shards: float32 2"}, None)


@pytest.mark.parametrize("size", [2, 20_000])  # the larger fails within PyTorch's writer
@pytest.mark.parametrize(("number", "told"), [("ENOSPC", "disk is full"), ("EDQUOT", "quota")])
def test_a_disk_that_cannot_be_written_is_told_in_words(tmp_path, monkeypatch, number, told, size):
    class Full(io.FileIO):
        def write(self, _):
            raise OSError(getattr(errno, number), "")

    monkeypatch.setattr(shards.io, "FileIO", Full)
    with pytest.raises(UserError, match=told):
        shards.write(tmp_path / "parts", {"w": torch.zeros(size)}, None)
    assert not (tmp_path / "parts").exists()


def test_an_index_that_is_missing_is_told_without_a_traceback_of_pytorch(damaged, caplog):
    folder, _ = damaged
    (folder / ".metadata").unlink()
    with pytest.raises(UserError, match=r"\.metadata cannot be read"):
        shards.read(folder, {"w": "in shards: float32 2"}, None)
    assert not caplog.records


def test_a_run_that_was_removed_is_not_made_anew(tmp_path):
    """Another directory would not help, also without shards."""
    folder, weights = tmp_path / "run" / "checkpoints", {"w": torch.zeros(2)}
    for write in (
        lambda: shards.write(folder / "parts", weights, None),
        lambda: write_text(folder / "index.json", "{}"),
        lambda: write_text(folder.parent / "result.json", "{}"),
    ):
        with pytest.raises(UserError, match=r"run was removed or renamed while .*start again"):
            write()
    assert not [*tmp_path.iterdir()]
