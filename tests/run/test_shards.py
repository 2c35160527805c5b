"""Sharded tensors: written by any number of ranks, read by any other, and never run."""

import hashlib
import pickle
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from samestep.errors import UserError
from samestep.run import shards
from samestep.run.host_copy import HostCopies
from tests.processes import run_ranks

ROWS = {"model": (7, 3), "bias": (5,), "few": (2, 2)}


def the_state() -> dict:
    """Return a state as a checkpoint holds it, with whole tensors."""
    generator = torch.Generator().manual_seed(3)
    made = {name: torch.randn(shape, generator=generator) for name, shape in ROWS.items()}
    model = OrderedDict({"0.weight": made["model"].double(), "0.bias": made["bias"]})
    model._metadata = {"": {"version": 1}}
    states = {0: {"step": torch.tensor(4.0), "exp_avg": made["few"].bfloat16()}}
    return {"format": 1, "model": model, "optimizer": {"state": states, "groups": [{"lr": 0.1}]}}


def mesh_of(dims: tuple[int, ...]):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if not dist.is_initialized():
        dist.init_process_group("gloo")
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
    copied = shards.with_parts(parts, HostCopies().take(shards.own_parts(parts)))
    hashes = shards.write(folder, copied, dist.group.WORLD)
    if dist.get_rank() == 0:
        torch.save(content, folder.with_suffix(".pt"))
    dist.barrier()
    dist.destroy_process_group()
    return hashes


def read(folder: Path, dims: tuple[int, ...]) -> bool:
    """Read it on these ranks; return whether each part is that of the state."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    content = torch.load(folder.with_suffix(".pt"), weights_only=True)
    found, wanted = shards.read(folder, content, mesh_of(dims)), sharded(the_state(), dims)
    pairs: list[tuple] = []
    shards.map_state(lambda path, leaf: pairs.append((path, leaf)), found)
    expected = {}
    shards.map_state(expected.setdefault, wanted)
    good = len(pairs) == len(expected)
    for path, leaf in pairs:
        other = expected[path]
        if isinstance(other, DTensor):
            good = good and leaf.placements == other.placements and leaf.shape == other.shape
            good = good and torch.equal(leaf.to_local(), other.to_local())
        elif isinstance(other, torch.Tensor):
            good = good and torch.equal(leaf, other)
        else:
            good = good and leaf == other
    dist.barrier()
    dist.destroy_process_group()
    return good


@pytest.fixture(scope="module", params=[(2,), (3,), (2, 2)], ids=str)
def written(request, tmp_path_factory) -> tuple[Path, dict[str, str]]:
    """Give a folder that ranks of some mesh have written, and the hashes that they told."""
    base = tmp_path_factory.mktemp("shards")
    ranks = 1
    for size in request.param:
        ranks *= size
    told = run_ranks(write, ranks, base / "out", base / "parts", request.param)
    assert all(one == told[0] for one in told)
    return base / "parts", told[0]


@pytest.mark.parametrize("dims", [(2,), (4,), (2, 2)], ids=str)
def test_another_number_of_ranks_reads_what_each_has_to_hold(written, tmp_path, dims):
    ranks = 4 if dims != (2,) else 2
    assert run_ranks(read, ranks, tmp_path / "out", written[0], dims) == [True] * ranks


def test_one_process_reads_whole_tensors(written):
    folder, _ = written
    found = shards.read(folder, torch.load(folder.with_suffix(".pt"), weights_only=True), None)
    expected = the_state()
    assert found["model"]._metadata == expected["model"]._metadata
    assert all(torch.equal(found["model"][k], v) for k, v in expected["model"].items())
    mine, its = (one["optimizer"]["state"][0] for one in (found, expected))
    assert all(torch.equal(mine[key], its[key]) for key in its)
    assert found["optimizer"]["groups"] == expected["optimizer"]["groups"]


def test_the_hashes_are_those_of_all_files(written):
    folder, hashes = written
    found = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}
    assert found == hashes
    shards.verify(folder, hashes)


@pytest.fixture
def damaged(written, tmp_path) -> tuple[Path, dict[str, str]]:
    """Give a copy that a test may damage."""
    folder = tmp_path / "parts"
    folder.mkdir()
    for path in written[0].iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder, written[1]


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


def test_an_entry_that_would_be_unpickled_is_refused(damaged):
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    folder, _ = damaged
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata["w"] = BytesStorageMetadata()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError):
        shards.read(folder, {"w": "in shards: float32 2"}, None)


def test_a_part_outside_the_folder_is_refused(damaged):
    folder, _ = damaged
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = "../elsewhere"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError):
        shards.read(folder, {"w": "in shards: float32 2"}, None)


def test_a_part_that_was_never_written_is_refused_in_words(damaged):
    with pytest.raises(UserError):
        shards.read(damaged[0], {"unknown": "in shards: float32 2"}, None)


def test_a_disk_that_cannot_be_written_is_told_in_words(tmp_path, monkeypatch):
    from torch.distributed.checkpoint.filesystem import FileSystem

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FileSystem, "create_stream", full)
    with pytest.raises(UserError, match="disk is full"):
        shards.write(tmp_path / "parts", {"w": torch.zeros(2)}, None)
    assert not (tmp_path / "parts").exists()
