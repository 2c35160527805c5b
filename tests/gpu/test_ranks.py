"""Ranks on a GPU: a group of one on NCCL, two that share the device, and runs that change devices.

One GPU is enough. `SAMESTEP_GROUP_OF_ONE=1` makes the process group exist at world size 1, so that
DDP, its all-reduce, and how a group begins and ends are those of many ranks.
"""

import os
from pathlib import Path

import pytest

from tests import tiny
from tests.command_line import read_json, run
from tests.gpu.trainings import TINY
from tests.processes import run_ranks

pytestmark = pytest.mark.gpu

GROUP_OF_ONE = {"SAMESTEP_GROUP_OF_ONE": "1"}


@pytest.fixture
def recipe(tmp_path):
    return tiny.write_recipe(tmp_path, TINY)


def train(recipe, folder, name, *flags, world_size=1, environment=None):
    """Train on so many ranks; return the run's directory."""
    path = folder / name
    arguments = ("train", recipe, "--run-dir", path, *flags)
    run(
        *map(str, arguments),
        world_size=world_size,
        folder=folder / "outputs",
        environment=environment,
    )
    return path


def _devices_of_the_fork_server():
    """Return the GPU's device files that the process which forked this one has open."""
    opened = Path(f"/proc/{os.getppid()}/fd").iterdir()
    return [link for link in map(os.readlink, opened) if link.startswith("/dev/nvidia")]


@pytest.mark.gpu(dry=True)
def test_the_fork_server_never_asks_the_driver(cuda, tmp_path):
    """Once it had, no rank that is forked from it could use a GPU."""
    assert run_ranks(_devices_of_the_fork_server, 1, tmp_path) == [[]]


@pytest.mark.parametrize("flags", [(), ("--batch-size", "12", "--accumulate", "3")])
def test_a_group_of_one_on_nccl_trains_as_one_process(cuda, recipe, tmp_path, flags):
    device = ("--device", cuda.type)
    alone = train(recipe, tmp_path, "alone", *device, *flags)
    grouped = train(recipe, tmp_path, "grouped", *device, *flags, environment=GROUP_OF_ONE)
    assert read_json(grouped / "environment.json")["backend"] == "nccl"
    tiny.assert_same_training(grouped, alone, 1e-9)


def test_a_group_of_one_resumes_and_leaves_cleanly(cuda, recipe, tmp_path):
    device = ("--device", cuda.type)
    whole = train(recipe, tmp_path, "whole", *device)
    path = train(recipe, tmp_path, "parts", *device, "--epochs", 2, environment=GROUP_OF_ONE)
    flags = ("train", str(path), "--resume", "--epochs", "6")
    run(*flags, folder=tmp_path / "outputs", environment=GROUP_OF_ONE)
    tiny.assert_same_training(path, whole, 1e-9)


def test_virtual_ranks_give_the_same_bits_on_one_rank_and_on_two(cuda, recipe, tmp_path):
    flags = ("--device", cuda.type, "--virtual-ranks", "4", "--precision", "fp32")
    alone = train(recipe, tmp_path, "alone", *flags)
    shared = train(recipe, tmp_path, "shared", *flags, "--oversubscribe", world_size=2)
    tiny.assert_same_training(shared, alone, tolerance=0)
    ends = {read_json(run / "result.json")["weights_sha256"] for run in (alone, shared)}
    assert len(ends) == 1


@pytest.mark.gpu(dry=True)
def test_two_ranks_that_share_the_device_train_as_one(cuda, recipe, tmp_path):
    """NCCL refuses two ranks on one GPU, so Gloo connects them."""
    alone = train(recipe, tmp_path, "alone", "--device", cuda.type)
    flags = ("--device", cuda.type, "--oversubscribe")
    shared = train(recipe, tmp_path, "shared", *flags, world_size=2)
    assert read_json(shared / "environment.json")["backend"] == "gloo"
    tiny.assert_same_training(shared, alone, 1e-9)


@pytest.mark.parametrize(
    "flags",
    [
        ("--batch-size", "7", "--accumulate", "2"),
        ("--clip-norm", "0.1", "--ema-decay", "0.9"),
        ("--find-unused",),
        ("--engine", "lightning"),
        ("--precision", "bf16", "--micro-batch-size", "2"),
    ],
)
def test_two_ranks_that_share_the_device_do_what_one_does(cuda, recipe, tmp_path, flags):
    device, tolerance = ("--device", cuda.type), 1e-2 if "bf16" in flags else 1e-9
    alone = train(recipe, tmp_path, "alone", *device, *flags)
    shared = train(recipe, tmp_path, "shared", *device, *flags, "--oversubscribe", world_size=2)
    tiny.assert_same_training(shared, alone, tolerance)


@pytest.mark.gpu(dry=True)
def test_a_run_goes_on_from_the_gpu_on_the_cpu_and_back(cuda, recipe, tmp_path):
    whole = train(recipe, tmp_path, "whole", "--device", "cpu")
    path = train(recipe, tmp_path, "parts", "--epochs", 2, "--device", cuda.type)
    for epochs, device in ((4, "cpu"), (6, cuda.type)):
        flags = ("--resume", "--epochs", str(epochs), "--device", device)
        run("train", str(path), *flags, folder=tmp_path / "outputs")
    tiny.assert_same_training(path, whole, 1e-9)


@pytest.mark.parametrize("on", [1, 2])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_last_bit(cuda, tmp_path, on):
    dropping = TINY.replace("nn.Tanh()", "nn.Tanh(), nn.Dropout(0.2)")
    recipe = tiny.write_recipe(tmp_path, dropping)
    flags = ("--device", cuda.type, "--oversubscribe")
    whole = train(recipe, tmp_path, "whole", *flags, world_size=on)
    path = train(recipe, tmp_path, "parts", *flags, "--epochs", 3, world_size=on)
    more = ("train", str(path), "--resume", "--epochs", "6", *flags)
    run(*more, world_size=on, folder=tmp_path / "outputs")
    tiny.assert_same_training(path, whole, 0.0)
