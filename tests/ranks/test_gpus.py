"""Which GPU is a rank's own, and no more processes than the machine carries unless insisted on."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from samestep.base import startup
from samestep.base.errors import UserError
from samestep.base.startup import threads_wished
from samestep.launch.ranks import nproc
from samestep.launch.ranks import world as worlds
from samestep.launch.ranks.launch import Launch
from samestep.launch.ranks.nproc import check_workers, cores, ranks_to_start
from tests.command_line import RECIPE, train_here
from tests.processes import launch_environment, run_ranks

SRUN = {"SLURM_GPU_BIND_TYPE": "per_task:1"}
ONE = {"CUDA_VISIBLE_DEVICES": "3"}


@pytest.mark.parametrize(
    ("launcher", "variables", "oversubscribe", "own"),
    [
        ("srun", SRUN, False, True),
        ("srun", {}, False, False),
        ("torchrun", ONE, False, True),
        ("openmpi", ONE, False, True),
        ("torchrun", {}, False, False),
        # Then they may share it, and Gloo has to connect them.
        ("torchrun", ONE, True, False),
        # samestep's own ranks see what samestep itself saw.
        ("torchrun", {**ONE, "SAMESTEP_PARENT": "17"}, False, False),
    ],
)
def test_a_gpu_is_a_ranks_own_where_that_is_said(launcher, variables, oversubscribe, own):
    launch = Launch(launcher=launcher, world_size=2, local_world_size=2)
    assert worlds.one_gpu_each(launch, variables, oversubscribe=oversubscribe) is own


@pytest.fixture
def one_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


def test_a_rank_that_sees_its_own_gpu_alone_takes_it(one_gpu):
    world = worlds.find_world(environment={**launch_environment(1, 2, 29500), **ONE})
    assert (world.local_rank, world.device) == (1, torch.device("cuda", 0))
    assert world.backend == "nccl"


@pytest.mark.parametrize("variables", [{}, {**ONE, "SAMESTEP_PARENT": "17"}])
def test_more_ranks_than_gpus_are_refused_where_nobody_chose_for_each(one_gpu, variables):
    with pytest.raises(UserError, match="1 visible"):
        worlds.find_world(environment={**launch_environment(1, 2, 29500), **variables})


def told_by(uuids, nodes):
    """Let ranks tell each other their GPUs; return what each of them raised."""
    store = dist.HashStore()

    def rank(number):
        launch = Launch(rank=number, world_size=len(uuids), node=nodes[number])
        try:
            worlds.check_gpus(launch, uuids[number], store)
        except UserError as error:
            return str(error), error.on_all_ranks
        return None

    with ThreadPoolExecutor(len(uuids)) as pool:
        return list(pool.map(rank, range(len(uuids))))


def joined(*uuids):
    """Join as ranks on GPUs do, whose UUIDs stand in; Gloo stands in for NCCL."""
    world = replace(worlds.find_world("cpu"), backend="nccl")
    begin = dist.init_process_group
    dist.init_process_group = lambda _backend, *, device_id, **how: begin("gloo", **how)
    found = []
    for gpus in uuids:
        worlds.gpu_uuid = lambda _device, gpus=gpus: gpus[world.rank]
        try:
            worlds.join(world, timeout_s=60)
        except UserError as error:
            found.append(str(error))
        else:
            found.append(world.gather(world.rank))
            worlds.leave(world)
    return found


def test_ranks_compare_their_gpus_and_two_on_one_are_refused_by_all_alike(tmp_path):
    one, other = run_ranks(joined, 2, tmp_path, "aa", "ab")
    assert one == other
    assert "Ranks 0, 1 " in one[0]
    assert one[1] == [0, 1]
    assert told_by(["a", "b", "c"], [0, 0, 1]) == [None] * 3
    # What calls itself the same on another node is another one.
    assert told_by(["a", "b", "a", "b"], [0, 0, 1, 1]) == [None] * 4
    told = told_by(["a", "b", "b"], [0, 0, 0])
    assert len(set(told)) == 1
    message, on_all_ranks = told[0]
    assert "Ranks 1, 2 " in message
    assert "--oversubscribe" in message
    assert on_all_ranks


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
        ("verify", "small.py", "--nproc", f"1,{MOST + 1}"),
    ],
)
def test_more_ranks_than_four_per_core_are_refused_with_the_most(recipe, refused, command):
    told = refused(*command)
    assert str(MOST + 1) in told
    assert f" {MOST}," in told
    assert "--oversubscribe" in told


def test_ranks_beyond_memory_and_too_many_loader_processes_are_refused(monkeypatch):
    monkeypatch.setattr(nproc, "free_memory_bytes", lambda: 3 * nproc.RANK_BYTES + 1)
    assert ranks_to_start(3) == 3
    with pytest.raises(UserError, match=r"at most 3\b.*--oversubscribe"):
        ranks_to_start(4)
    assert ranks_to_start(4, oversubscribe=True) == 4
    assert ranks_to_start(MOST + 1, oversubscribe=True) == MOST + 1
    check_workers(4, num_ranks=2, num_cores=2)
    with pytest.raises(UserError, match=r"--num-workers 5 .* 8\b"):
        check_workers(5, num_ranks=2, num_cores=2)


def test_auto_is_a_rank_per_gpu_which_ranks_share_only_where_the_user_insists(monkeypatch):
    assert ranks_to_start("auto", "cpu") == cores()
    monkeypatch.setattr(nproc, "free_memory_bytes", lambda: nproc.RANK_BYTES)
    assert ranks_to_start("auto", "cpu") == 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert ranks_to_start("auto") == ranks_to_start("auto", "cuda") == 3
    assert ranks_to_start("auto", "cpu") == 1
    assert worlds.choose_device("auto", 3, cuda=2, oversubscribe=True) == torch.device("cuda", 1)
    with pytest.raises(UserError, match="--oversubscribe"):
        worlds.choose_device("auto", 3, cuda=2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    environment = launch_environment(3, 4, 29500)
    world = worlds.find_world("auto", environment=environment, oversubscribe=True)
    assert (world.device, world.backend) == (torch.device("cuda", 1), "gloo")  # NCCL refuses that
    environment = launch_environment(1, 2, 29500)
    assert worlds.find_world("auto", environment=environment, oversubscribe=True).backend == "nccl"


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
