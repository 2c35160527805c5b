"""A process group of one rank runs what connects ranks, and changes no bit of a training."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from samestep.lightning.engine import _Strategy
from samestep.ranks import world as worlds
from samestep.ranks.world import GROUP_OF_ONE, find_world, join, leave
from samestep.settings import Settings
from samestep.training import prepare
from tests.tiny import all_records, assert_same_training, trained, write_recipe


@pytest.fixture
def alone(monkeypatch):
    """A world of one rank that is connected all the same."""
    monkeypatch.setenv(GROUP_OF_ONE, "1")
    world = find_world("cpu", environment={GROUP_OF_ONE: "1"})
    join(world)
    yield world
    leave(world)
    assert not worlds.dist.is_initialized()


def test_its_collectives_run_and_return_what_one_rank_gives(alone):
    assert (alone.world_size, alone.backend, alone.connected) == (1, "gloo", True)
    assert worlds.dist.get_world_size() == 1
    tensor = torch.tensor([1.0, 2.0])
    reduced = alone.reduce(tensor)
    assert reduced is not tensor
    assert reduced.tolist() == tensor.tolist()
    alone.add_up(tensor)
    alone.take_from_main(tensor)
    alone.barrier()
    assert tensor.tolist() == [1.0, 2.0]
    assert alone.gather("a") == ["a"]
    assert alone.broadcast({"a": 1}) == {"a": 1}
    assert alone.on_every(lambda: 3) == alone.on_main(lambda: 3) == 3
    wrapped = prepare.wrap(nn.Linear(2, 2), alone, Settings(bucket_cap_mb=3))
    assert isinstance(wrapped, DistributedDataParallel)
    assert wrapped.bucket_bytes_cap == 3 << 20


def test_in_both_engines_ddp_keeps_the_buckets_of_its_first_step(alone):
    strategy = _Strategy(parallel_devices=[alone.device])
    models = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2)]
    for wrapped in (prepare.wrap(models[0], alone, Settings()), strategy._setup_model(models[1])):
        for _ in range(2):
            wrapped(torch.ones(1, 2)).sum().backward()
        assert not wrapped._has_rebuilt_buckets


def test_without_the_variable_one_rank_makes_no_group():
    world = find_world("cpu", environment={GROUP_OF_ONE: "0"})
    assert not world.connected
    model = nn.Linear(2, 2)
    assert prepare.wrap(model, world, Settings()) is model


def test_a_training_with_the_group_has_the_same_bits(tmp_path, monkeypatch):
    recipe = write_recipe(tmp_path)
    for name, variable in {"plain": "0", "group": "1"}.items():
        monkeypatch.setenv(GROUP_OF_ONE, variable)
        flags = ("--device", "cpu", "--epochs", "2", "--accumulate", "3", "--clip-norm", "0.1")
        trained(recipe, tmp_path / name, *flags)
    assert_same_training(tmp_path / "group", tmp_path / "plain", tolerance=0)
    waits = {
        name: next(r for r in all_records(tmp_path / name) if r["event"] == "epoch")["phases"]
        for name in ("plain", "group")
    }
    assert waits["plain"]["all_reduce"] == 0.0 < waits["group"]["all_reduce"]
