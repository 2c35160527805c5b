"""No more processes are started than the machine carries, unless the user insists."""

from pathlib import Path

import pytest
import torch

from samestep.errors import UserError
from samestep.ranks import nproc, startup
from samestep.ranks.nproc import check_workers, cores, ranks_to_start
from samestep.ranks.startup import threads_wished
from samestep.ranks.world import choose_device, find_world
from tests.command_line import RECIPE, train_here
from tests.processes import launch_environment

MOST = 4 * cores()
LOADED = RECIPE.replace(
    "def model", "from torch.utils.data import StackDataset\n\ndef model"
).replace("train=(x[:60], y[:60])", "train=StackDataset(x[:60], y[:60])")


@pytest.fixture
def recipe(here):
    (here / "small.py").write_text(RECIPE)
    (here / "loaded.py").write_text(LOADED)


@pytest.mark.parametrize(
    "command",
    [
        ("train", "small.py", "--nproc", str(MOST + 1)),
        ("profile", "small.py", "--nproc", str(MOST + 1)),
        ("scale", "small.py", "--nproc", f"1,{MOST + 1}"),
        ("verify", "small.py", "--world-sizes", f"1,{MOST + 1}"),
    ],
)
def test_more_ranks_than_four_per_core_are_refused_with_the_most(recipe, refused, command):
    told = refused(*command)
    assert str(MOST + 1) in told
    assert f" {MOST}," in told
    assert "--oversubscribe" in told


def test_ranks_that_memory_cannot_carry_are_refused_with_the_most(monkeypatch):
    monkeypatch.setattr(nproc, "free_memory_bytes", lambda: 3 * nproc.RANK_BYTES + 1)
    assert ranks_to_start(3) == 3
    with pytest.raises(UserError, match=r"at most 3\b.*--oversubscribe"):
        ranks_to_start(4)
    assert ranks_to_start(4, oversubscribe=True) == 4
    assert ranks_to_start(MOST + 1, oversubscribe=True) == MOST + 1


def test_auto_is_a_rank_per_gpu_else_per_core_as_memory_allows(monkeypatch):
    assert ranks_to_start("auto", "cpu") == cores()
    monkeypatch.setattr(nproc, "free_memory_bytes", lambda: nproc.RANK_BYTES)
    assert ranks_to_start("auto", "cpu") == 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert ranks_to_start("auto") == ranks_to_start("auto", "cuda") == 3
    assert ranks_to_start("auto", "cpu") == 1


def test_more_loader_processes_than_four_per_core_are_refused():
    check_workers(4, num_ranks=2, num_cores=2)
    with pytest.raises(UserError, match=r"--num-workers 5 .* 8\b"):
        check_workers(5, num_ranks=2, num_cores=2)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # they are as many
def test_loader_processes_are_counted_only_where_there_are_any(recipe, refused):
    flags = ("--num-workers", str(MOST + 1), "--run-dir")
    assert f"--num-workers {MOST + 1}" in refused("train", "loaded.py", *flags, "a")
    assert not Path("a").exists()
    train_here("small.py", *flags, "b")


@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        ({}, None),
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "1"}, 1),
        ({"OMP_NUM_THREADS": "4,2"}, 4),
        ({"OMP_NUM_THREADS": "many"}, None),
        # torchrun sets a 1 of its own.
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}, None),
        ({"OMP_NUM_THREADS": "3", "TORCHELASTIC_RUN_ID": "x"}, 3),
        # So does samestep, and keeps what the user had set.
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x", startup.THREADS_WISHED: ""}, None),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x", startup.THREADS_WISHED: "1"}, 1),
    ],
)
def test_the_users_number_of_threads_is_told_from_a_launchers(environment, threads):
    assert threads_wished(environment) == threads


def test_ranks_share_the_gpus_in_turn_only_where_the_user_insists(monkeypatch):
    assert choose_device("auto", 3, cuda=2, oversubscribe=True) == torch.device("cuda", 1)
    with pytest.raises(UserError, match="--oversubscribe"):
        choose_device("auto", 3, cuda=2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    environment = launch_environment(3, 4, 29500)
    world = find_world("auto", environment=environment, oversubscribe=True)
    assert (world.device, world.backend) == (torch.device("cuda", 1), "gloo")  # NCCL refuses that
    environment = launch_environment(1, 2, 29500)
    assert find_world("auto", environment=environment, oversubscribe=True).backend == "nccl"
