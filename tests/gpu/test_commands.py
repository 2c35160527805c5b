"""Every recipe trains an epoch on a GPU, and every verb that asks a device works there."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from samestep import read_records
from tests import tiny
from tests.command_line import read_json, run
from tests.gpu.trainings import TINY

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
MADE = ("--width", "4", "--batch-size", "10", "--log-every", "1")
"""For made images, of which there are few."""


def printed_json(*arguments, folder):
    text = run(*map(str, arguments), folder=folder / "outputs").printed(0)
    found, _ = json.JSONDecoder().raw_decode(text[text.index("{") :])
    return found


def train(cuda, folder, *arguments, name="run"):
    """Train on the device; return the run's directory, which must say that it was there."""
    path = folder / name
    flags = ("--run-dir", path, "--device", cuda.type, "--epochs", 1)
    run("train", *map(str, (*arguments, *flags)), folder=folder / "outputs")
    assert read_json(path / "environment.json")["device"].startswith(cuda.type)
    assert read_json(path / "result.json")["status"] == "completed"
    losses = [r["loss"] for r in read_records(path) if r["event"] == "step"]
    assert losses
    assert all(map(math.isfinite, losses))
    return path


def is_real(folder):
    return str(folder).startswith(os.environ.get("SAMESTEP_GPU_DATA", "\0"))


def assert_evaluates_alike(path, cuda, folder):
    ours, theirs = (
        printed_json("evaluate", path, "--device", device, "--json", folder=folder)
        for device in (cuda.type, "cpu")
    )
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.01)  # a GPU may use TF32
    assert ours["accuracy"] == pytest.approx(theirs["accuracy"], abs=0.01)


@pytest.mark.gpu(dry=True)
@pytest.mark.parametrize("recipe", ["spiral", "mnist"])
def test_a_small_recipe_trains_an_epoch_and_is_evaluated(cuda, recipe, mnist, tmp_path):
    flags = ("--data-dir", mnist, "--batch-size", 10) if recipe == "mnist" else ()
    path = train(cuda, tmp_path, recipe, *flags, "--log-every", 4)
    assert_evaluates_alike(path, cuda, tmp_path)


@pytest.mark.gpu(dry=True)
@pytest.mark.parametrize("recipe", ["cifar10", "images"])
def test_a_recipe_of_images_trains_an_epoch_and_predicts(cuda, recipe, cifar10, images, tmp_path):
    folder = cifar10 if recipe == "cifar10" else images
    flags = () if is_real(folder) else MADE
    path = train(cuda, tmp_path, recipe, "--data-dir", folder, *flags)
    if not is_real(folder):  # a CPU takes long for 10,000 images
        assert_evaluates_alike(path, cuda, tmp_path)
    told = printed_json("evaluate", path, "--device", cuda.type, "--json", folder=tmp_path)
    assert told["loss"] == pytest.approx(read_json(path / "result.json")["test"]["loss"], rel=1e-3)
    photo = next((images / "test").rglob("*.jpg"))
    told = printed_json("predict", path, photo, "--device", cuda.type, "--json", folder=tmp_path)
    assert sum(one["probability"] for one in told["classes"]) == pytest.approx(1, abs=0.9)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_resnet_trains_an_epoch_in_half_precision(cuda, cifar10, precision, tmp_path):
    size = 256 if is_real(cifar10) else 20
    flags = ("--width", 16, "--precision", precision, "--batch-size", size, "--log-every", 1)
    train(cuda, tmp_path, "cifar10", "--data-dir", cifar10, *flags)


@pytest.mark.gpu(dry=True)
def test_lightning_trains_an_epoch(cuda, tmp_path):
    recipe = tiny.write_recipe(tmp_path, TINY)
    train(cuda, tmp_path, recipe, "--engine", "lightning", "--precision", "fp32")


def test_compiling_trains_an_epoch_and_is_recorded(cuda, tmp_path):
    path = train(cuda, tmp_path, "spiral", "--compile", "on")
    assert [r for r in read_records(path) if r["event"] == "compile"]
    assert_evaluates_alike(path, cuda, tmp_path)


@pytest.mark.gpu(dry=True)
def test_a_profile_says_what_the_device_did(cuda, tmp_path):
    flags = ("--device", cuda.type, "--steps", 20, "--run-dir", tmp_path / "profile", "--json")
    found = printed_json("profile", "spiral", *flags, folder=tmp_path)
    measured = found["measured"]
    assert measured["device"].startswith(cuda.type)
    assert measured["steps"] == 20
    phases = measured["ranks"][0]["phases"]
    assert sum(phases.values()) == pytest.approx(measured["wall"], rel=0.05)
    assert found["verdict"]


def test_a_verification_of_one_rank_runs_on_the_device(cuda, tmp_path):
    recipe = tiny.write_recipe(tmp_path, TINY)
    flags = ("--nproc", "1", "--quick", "--device", "cuda", "--json")
    found = printed_json("verify", recipe, *flags, folder=tmp_path)
    assert found["same"]


def test_scaling_is_measured_where_ranks_share_the_device(cuda, tmp_path):
    flags = ("--nproc", "1,2", "--mode", "strong", "--rounds", 1, "--seconds", 0.5)
    flags += ("--device", "cuda", "--oversubscribe", "--json")
    found = printed_json("scale", "spiral", *flags, folder=tmp_path)
    assert len(found["modes"]["strong"]) == 2


def test_the_command_of_the_readme_trains_as_it_is_typed(cuda, tmp_path):
    """A process of its own, with no variable of these tests; `auto` must choose the GPU."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTORCH_NVML_BASED_CUDA_CHECK"}
    command = (sys.executable, "-m", "samestep", "train", "spiral", "--epochs", "1")
    done = subprocess.run(
        [*command, "--run-dir", str(tmp_path / "run")],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_json(tmp_path / "run" / "environment.json")["device"] == "cuda:0"
