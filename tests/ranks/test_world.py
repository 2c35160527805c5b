"""Which device, backend and interface a rank gets, and what the collectives return."""

import math
import socket
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from samestep.base.errors import UserError
from samestep.launch.ranks import address as addresses
from samestep.launch.ranks import world as worlds
from tests.processes import env, launch_environment, run_ranks

# (wanted, local rank, GPUs, Apple GPU) → device
DEVICES = {
    ("auto", 3, 0, False): "cpu",
    ("auto", 3, 4, False): "cuda:3",
    ("cuda", 2, 8, False): "cuda:2",
    ("auto", 0, 2, True): "cuda:0",
    ("auto", 0, 0, True): "mps",
    ("mps", 0, 0, True): "mps",
    ("cpu", 1, 4, True): "cpu",
}


@pytest.mark.parametrize("case", DEVICES, ids=str)
def test_a_rank_gets_the_best_device_of_its_node(case):
    wanted, local_rank, cuda, mps = case
    found = worlds.choose_device(wanted, local_rank, cuda=cuda, mps=mps)
    assert found == torch.device(DEVICES[case])


@pytest.mark.parametrize(
    ("wanted", "local_rank", "cuda", "says"),
    [
        ("cuda", 0, 0, "CUDA.*--device auto"),
        ("mps", 0, 4, "Apple GPU"),
        ("gpu", 0, 4, "'cuda'"),
        ("auto", 4, 4, "4 visible"),
        ("cuda", 1, 1, "1 visible"),
    ],
)
def test_a_device_that_is_absent_is_refused_and_never_replaced(wanted, local_rank, cuda, says):
    with pytest.raises(UserError, match=says):
        worlds.choose_device(wanted, local_rank, cuda=cuda, mps=False)


def test_the_device_follows_the_local_rank_and_never_the_global_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    place = env("LOCAL_RANK=2 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 MASTER_ADDR=first")
    world = worlds.find_world(environment=launch_environment(6, 8, 29500) | place)
    assert (world.rank, world.local_rank, world.node) == (6, 2, 1)
    assert world.device == torch.device("cuda:2")


# (wanted, device, platform) → backend, if it can be
BACKENDS = {
    ("auto", "cuda:1", "linux"): "nccl",
    ("gloo", "cuda:0", "linux"): "gloo",
    ("auto", "cpu", "linux"): "gloo",
    ("auto", "mps", "darwin"): "gloo",
    ("auto", "cuda:0", "win32"): "gloo",
    ("nccl", "cpu", "linux"): "",
    ("nccl", "cuda:0", "win32"): "",
    ("nccl", "mps", "darwin"): "",
}


@pytest.mark.parametrize("case", BACKENDS, ids=str)
def test_the_backend_follows_platform_and_device_and_nccl_is_refused_where_it_cannot_serve(case):
    wanted, device, platform = case
    refused = pytest.raises(UserError, match=r"--backend nccl .*--backend auto")
    with nullcontext() if BACKENDS[case] else refused:
        assert worlds.choose_backend(wanted, torch.device(device), platform) == BACKENDS[case]


@pytest.mark.parametrize(
    ("wanted", "world_size", "device", "warned"),
    [("auto", 1, "mps", False), ("auto", 2, "cpu", True), ("mps", 2, "mps", True)],
)
def test_several_ranks_on_one_apple_gpu_are_told(monkeypatch, wanted, world_size, device, warned):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    world = worlds.find_world(wanted, environment=launch_environment(0, world_size, 29500))
    assert world.device.type == device
    assert world.backend == ("gloo" if world_size > 1 else "none")
    assert any("Apple GPU" in note for note in world.notes) == warned


def test_a_rank_computes_a_vector_function_before_it_has_other_work():
    with torch.autograd.profiler.profile() as seen:
        worlds.find_world("cpu", environment={})
    assert "aten::sqrt" in {event.name for event in seen.function_events}


def test_alone_every_collective_returns_its_input():
    with pytest.raises(UserError, match="--backend nccl"):  # no less than with others
        worlds.find_world("cpu", "nccl", environment={})
    world = worlds.find_world("cpu", environment={})
    worlds.join(world)
    assert not worlds.dist.is_initialized()
    tensor = torch.tensor([1.0, math.inf])
    assert world.is_main
    assert world.reduce(tensor) is world.reduce(tensor, "max") is tensor
    value = object()
    assert world.gather(value) == [value]
    ways = world.broadcast(value), world.on_main(lambda: value), world.on_every(lambda: value)
    assert all(result is value for result in ways)
    world.barrier()
    worlds.leave(world)


def on_three_ranks():
    world = worlds.find_world("cpu")
    worlds.join(world, timeout_s=60)
    mine = torch.tensor([float(world.rank), 1.0])
    found = {
        "sum": world.reduce(mine).tolist(),
        "max": world.reduce(mine, "max").tolist(),
        "input": mine.tolist(),
        "broadcast": world.broadcast({"from": world.rank}),
        "gather": world.gather(world.rank * 10),
        "on_main": world.on_main(lambda: f"made by {world.rank}"),
        "is_main": world.is_main,
        "errors": [
            _error_of(lambda: world.on_main(lambda: _refuse(world.rank))),
            _error_of(lambda: world.on_every(lambda: world.rank > 0 or _refuse(0))),
            _error_of(lambda: world.on_every(lambda: _refuse("all"))),
        ],
    }
    worlds.leave(world)
    return found


def _refuse(who):
    raise UserError(f"refused by {who}")


def _error_of(function):
    try:
        function()
    except UserError as error:
        return str(error)
    return "none"


def test_collectives_agree_on_every_rank_and_leave_their_input_as_it_was(tmp_path):
    for rank, found in enumerate(run_ranks(on_three_ranks, 3, tmp_path)):
        assert found == {
            "sum": [3.0, 3.0],
            "max": [2.0, 1.0],
            "input": [float(rank), 1.0],
            "broadcast": {"from": 0},
            "gather": [0, 10, 20],
            "on_main": "made by 0",
            "is_main": rank == 0,
            # A mistake that one rank sees is raised on all, and names the rank only if it is one.
            "errors": ["refused by 0", "[rank 0] refused by 0", "refused by all"],
        }


def meets_again() -> list[bool]:
    world, found = worlds.find_world("cpu", "gloo", oversubscribe=True), []
    for _ in range(3):
        store = worlds.open_store(world, 60)
        found.append(store.check(["left"]))
        worlds.join(world, 60, store)
        store.set("left", "behind")
        assert world.gather(world.rank) == [0, 1]
        worlds.leave(world)
    return found


def test_ranks_that_meet_again_find_nothing_of_their_last_meeting(tmp_path):
    # An address of that time would lead one of them to where nobody listens any more.
    assert run_ranks(meets_again, 2, tmp_path) == [[False] * 3] * 2


def test_a_master_needs_an_address_and_a_slow_name_server_is_asked_again(monkeypatch):
    with pytest.raises(UserError, match=r"no-such-host\.invalid") as error:
        addresses.resolve_master("no-such-host.invalid")
    assert socket.gethostname() in str(error.value)
    assert "MASTER_ADDR" in str(error.value)
    assert addresses.interface_of("127.0.0.1") == "lo"
    assert addresses.interface_of("192.0.2.77") == ""  # of a net for documentation
    assert addresses.resolve("localhost") in ("127.0.0.1", "::1")
    later, found = socket.gaierror(socket.EAI_AGAIN, "later"), [(0, 0, 0, "", ("10.1.2.3", 0))]
    monkeypatch.setattr(addresses.socket, "getaddrinfo", Mock(side_effect=[later, found]))
    monkeypatch.setattr(addresses, "time", SimpleNamespace(sleep=lambda _: None))
    assert addresses.resolve_master("node1") == "10.1.2.3"
    names = ("127.0.1.1", "::1", "10.0.0.1", "fe80::1%eth0", "")
    assert [*map(addresses.is_loopback, names)] == [True, True, False, False, False]


@pytest.mark.parametrize("own", ["127.0.1.1", ""])
def test_where_it_has_none_the_interface_on_the_way_to_rank_0_is_named(monkeypatch, own):
    ways = {"10.9.9.9": "10.1.2.3", "192.0.2.1": "10.4.5.6"}
    monkeypatch.setattr(addresses, "address_towards", lambda to: ways.get(to, "127.0.0.1"))
    names = {"10.1.2.3": "ib0", "10.4.5.6": "eth0"}
    monkeypatch.setattr(addresses, "interface_of", lambda address: names[address])
    assert addresses.interface_towards("10.9.9.9", own) == "ib0"
    # On rank 0's own host: the way out.
    assert addresses.interface_towards("127.0.1.1", own) == "eth0"
    assert addresses.interface_towards("10.9.9.9", own="10.1.2.3") == "", "Gloo chooses by itself"
    monkeypatch.setattr(addresses, "address_towards", lambda _: "")  # without a network
    assert addresses.interface_towards("127.0.1.1", own) == ""


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ("^docker,lo", "NCCL_SOCKET_IFNAME"),
        ("=lo", "NCCL_SOCKET_IFNAME"),
        ("no-such-0", "no interface no-such-0, but .*lo"),
        ("lo,no-such-0", "no interface no-such-0"),
    ],
)
def test_an_interface_with_which_gloo_cannot_start_is_refused_with_those_that_are_here(names, says):
    with pytest.raises(UserError, match=f"GLOO_SOCKET_IFNAME is .*{says}"):
        addresses.check_gloo_interfaces(names)
    addresses.check_gloo_interfaces("lo")
