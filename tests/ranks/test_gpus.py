"""A rank that sees one GPU alone: its own, or one that several would share unawares."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from samestep.errors import UserError
from samestep.ranks import world as worlds
from samestep.ranks.launch import Launch
from samestep.ranks.world import check_gpus, find_world, join, leave, one_gpu_each
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
def test_a_gpu_is_a_ranks_own_where_its_launcher_or_a_variable_says_so(
    launcher, variables, oversubscribe, own
):
    launch = Launch(launcher=launcher, world_size=2, local_world_size=2)
    assert one_gpu_each(launch, variables, oversubscribe=oversubscribe) is own


@pytest.fixture
def one_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


@pytest.mark.parametrize("launched", [launch_environment(1, 2, 29500), MPIRUN])
def test_a_rank_that_sees_its_own_gpu_alone_takes_it(one_gpu, launched):
    world = find_world(environment={**launched, **ONE})
    assert (world.local_rank, world.device) == (1, torch.device("cuda", 0))
    assert world.backend == "nccl"


@pytest.mark.parametrize("variables", [{}, {**ONE, "SAMESTEP_PARENT": "17"}])
def test_more_ranks_than_gpus_are_refused_where_nobody_chose_for_each(one_gpu, variables):
    with pytest.raises(UserError, match="1 visible"):
        find_world(environment={**launch_environment(1, 2, 29500), **variables})


def told_by(uuids, nodes):
    """Let ranks tell each other their GPUs; return what each of them raised."""
    store = dist.HashStore()

    def rank(number):
        launch = Launch(rank=number, world_size=len(uuids), node=nodes[number])
        try:
            check_gpus(launch, uuids[number], store)
        except UserError as error:
            return str(error), error.on_all_ranks
        return None

    with ThreadPoolExecutor(len(uuids)) as pool:
        return list(pool.map(rank, range(len(uuids))))


def test_two_ranks_on_one_gpu_are_refused_by_all_alike():
    assert told_by(["a", "b", "c"], [0, 0, 1]) == [None] * 3
    # What calls itself the same on another node is another one.
    assert told_by(["a", "b", "a", "b"], [0, 0, 1, 1]) == [None] * 4
    told = told_by(["a", "b", "b"], [0, 0, 0])
    assert len(set(told)) == 1
    message, on_all_ranks = told[0]
    assert "Ranks 1, 2 " in message
    assert "--oversubscribe" in message
    assert on_all_ranks


def joined(*uuids):
    """Join as ranks on GPUs do, whose UUIDs stand in; Gloo stands in for NCCL."""
    world = replace(find_world("cpu"), backend="nccl")
    begin = dist.init_process_group
    dist.init_process_group = lambda _backend, *, device_id, **how: begin("gloo", **how)
    found = []
    for gpus in uuids:
        worlds.gpu_uuid = lambda _device, gpus=gpus: gpus[world.rank]
        try:
            join(world, timeout_s=60)
        except UserError as error:
            found.append(str(error))
        else:
            found.append(world.gather(world.rank))
            leave(world)
    return found


def test_ranks_compare_their_gpus_before_they_join(tmp_path):
    one, other = run_ranks(joined, 2, tmp_path, "aa", "ab")
    assert one == other
    assert "Ranks 0, 1 " in one[0]
    assert one[1] == [0, 1]
