"""A step never makes the host wait for the device, its phases add up, and memory can run out."""

import contextlib
import json
from itertools import islice

import pytest

from samestep import read_records
from samestep.core.training.loop import rehearse
from tests import tiny
from tests.command_line import refusal, run, typed
from tests.gpu.trainings import blocks, built, no_synchronisation

pytestmark = pytest.mark.gpu

WARM_UP = 5

# Its model takes 8 GiB for each sample of a batch: the few samples of the trial fit, a batch does
# not fit on any device that there is.
LARGE = """
import torch
from torch import nn
from samestep import Recipe, Splits
class Large(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
    def forward(self, x):
        x.new_empty(len(x), 2**31)
        return x * self.weight
def data():
    x = torch.randn(400, 2)
    return Splits(train=(x, (x[:, 0] > 0).long()))
recipe = Recipe(model=Large, data=data, settings={"batch_size": 200, "epochs": 1})
"""


@pytest.fixture(scope="module")
def trained(cifar10, mnist):
    return {
        "spiral": ("spiral",),
        "sgd, clipped": ("spiral", "--optimizer", "sgd", "--momentum", "0.9", "--clip-norm", "1"),
        "convnet": ("mnist", "--data-dir", mnist, "--model", "convnet", "--batch-size", "10"),
        "accumulated": ("mnist", "--data-dir", mnist, "--batch-size", "10", "--accumulate", "2"),
        "cifar10, bf16": (
            *("cifar10", "--data-dir", cifar10, "--precision", "bf16"),
            *("--width", "8", "--batch-size", "10"),
        ),
    }


NAMES = ("spiral", "sgd, clipped", "convnet", "accumulated", "cifar10, bf16")


@pytest.mark.parametrize("name", NAMES)
def test_an_eager_step_does_not_synchronise(cuda, trained, name):
    with built(cuda, *trained[name]) as training:
        training.work.learner.model.train()
        read = blocks(training, WARM_UP + 3)
        for number, block in enumerate(read):
            waits = number < WARM_UP  # what a first step agrees on, and allocates
            with contextlib.nullcontext() if waits else no_synchronisation():
                training.work.step(block, number, [0.001], want_norm=number % 2 == 0)


@pytest.mark.parametrize("name", NAMES)
def test_the_loop_does_not_synchronise_within_an_epoch(cuda, trained, name):
    with built(cuda, *trained[name]) as training:
        assert training.work.plan.steps_per_epoch >= WARM_UP + 3
        steps = rehearse(training.work.endless(), training.state)
        list(islice(steps, WARM_UP))
        with no_synchronisation():
            list(islice(steps, 3))


@pytest.mark.gpu(dry=True)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_phases_of_an_epoch_add_up_to_its_time(cuda, tmp_path, precision):
    """The device's events tell the phases, the host's clock the time of the epoch."""
    arguments = ("train", "spiral", "--run-dir", str(tmp_path / "run"), "--device", cuda.type)
    run(*arguments, "--epochs", "3", "--precision", precision, folder=tmp_path / "output")
    epochs = [r for r in read_records(tmp_path / "run") if r["event"] == "epoch"]
    assert len(epochs) == 3
    for epoch in epochs:
        phases = epoch["phases"]
        assert sum(phases.values()) == pytest.approx(epoch["train_seconds"], rel=0.02, abs=1e-3)
        assert all(phases[name] > 0 for name in ("data", "forward", "backward", "optimizer"))


def test_out_of_memory_is_one_message_that_names_the_batch_size(cuda, tmp_path):
    recipe = tiny.write_recipe(tmp_path, LARGE)
    told = refusal("train", str(recipe), "--run-dir", str(tmp_path / "run"), folder=tmp_path)
    assert "memory" in told
    assert "--micro-batch-size" in told


@pytest.mark.parametrize("compiles", ["off", "on"])
def test_a_profile_says_how_much_of_a_step_the_gpu_idles(cuda, tmp_path, compiles):
    words = ("spiral", "--batch-size", "32", "--compile", compiles, "--seconds", "1", "--json")
    done = typed("-m", "samestep", "profile", *words, "--run-dir", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    measured = found["measured"]
    (rank,) = measured["ranks"]
    assert measured["device"] == cuda.type
    assert 0 < rank["operations"]["gpu_busy"] < 1.05 * measured["wall"]
    assert 0 <= measured["gpu_idle"] < 1
    if compiles == "off":
        assert measured["gpu_idle"] > 0.3, "an eager step of a model this small waits for the host"


def test_busy_steps_leave_the_gpu_no_idle_time(cuda, tmp_path):
    """Products of large matrices: a kernel that runs for milliseconds hides all the rest."""
    recipe = tmp_path / "large.py"
    recipe.write_text(
        "import torch\n"
        "from torch import nn\n"
        "from samestep import Recipe, Splits\n"
        "def data():\n"
        "    return Splits(train=(torch.randn(16384, 4096), torch.zeros(16384).long()))\n"
        "def model():\n"
        "    wide = [layer for _ in range(4) for layer in (nn.Linear(4096, 4096), nn.ReLU())]\n"
        "    return nn.Sequential(*wide, nn.Linear(4096, 2))\n"
        "recipe = Recipe(model=model, data=data, settings={'epochs': 9, 'batch_size': 4096})\n"
    )
    words = (str(recipe), "--seconds", "1", "--json", "--run-dir", str(tmp_path / "run"))
    done = typed("-m", "samestep", "profile", *words)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["measured"]["gpu_idle"] < 0.1
