"""A GPU takes the CPU's steps, in every precision, compiled or not, wherever the data lies."""

import pytest
import torch

from tests import tiny
from tests.gpu import trainings
from tests.gpu.conftest import DRY
from tests.gpu.trainings import IN_FILES, IN_MEMORY_PLAIN, TINY, first_steps, take
from tests.processes import run_ranks
from tests.training.test_trajectory import CONVNET

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")
TINY_WIDTH = ("--width", "2", "--batch-size", "10")
WIDTH = ("--width", "8", "--batch-size", "32")
CLOSE = {"fp64": 1e-9, "fp32": 1e-4}


def assert_close(one, other, tolerance):
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.fixture
def tiny_recipe(tmp_path):
    return tiny.write_recipe(tmp_path, TINY)


@pytest.mark.parametrize(
    ("recipe", "precision"),
    [
        pytest.param(recipe, precision, marks=pytest.mark.gpu(dry=precision == "fp32"))
        for recipe in ("spiral", "mnist", "cifar10", "augmented")
        for precision in CLOSE
    ],
)
def test_the_first_losses_are_as_on_the_cpu(
    cuda, ieee, recipe, precision, mnist, cifar10, tmp_path
):
    """Dropout draws other numbers on another device, so the recipes that have it go without."""
    target, *flags = {
        "spiral": ("spiral", "--dropout", "0"),
        "mnist": ("mnist", "--data-dir", mnist),
        "cifar10": ("cifar10", "--data-dir", cifar10, *(TINY_WIDTH if DRY else WIDTH)),
        "augmented": (tiny.write_recipe(tmp_path, CONVNET),),
    }[recipe]
    flags += ["--clip-norm", "1", "--precision"]
    ours, theirs = (first_steps(device, target, *flags, precision) for device in (cuda, CPU))
    assert len(ours.losses) == 10
    assert_close(ours.losses, theirs.losses, CLOSE[precision])
    # Ten steps of a ResNet amplify rounding: the CPU's own norms in fp32 are 5e-3 off those in fp64
    # by then. So the GPU may be as far off, on another side.
    exact = first_steps(CPU, target, *flags, "fp64").norms
    rounding = float((theirs.norms / exact - 1).abs().max())
    assert_close(ours.norms, exact, max(CLOSE[precision] * 10, 2 * rounding))


@pytest.mark.gpu(dry=True)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_weights_after_the_first_steps_are_those_of_the_cpu(cuda, optimizer, tiny_recipe):
    flags = ("--optimizer", optimizer, "--weight-decay", "0.1", "--schedule", "cosine")
    ours, theirs = (first_steps(device, tiny_recipe, *flags, steps=30) for device in (cuda, CPU))
    assert_close(ours.weights, theirs.weights, 1e-9)


@pytest.mark.gpu(dry=True)
def test_bf16_trains_close_to_fp32(cuda, mnist):
    steps = {
        precision: first_steps(cuda, "mnist", "--data-dir", mnist, "--precision", precision)
        for precision in ("bf16", "fp32")
    }
    assert not torch.equal(steps["bf16"].losses, steps["fp32"].losses)
    assert_close(steps["bf16"].losses, steps["fp32"].losses, 0.05)


@pytest.mark.gpu(dry=True)
def test_fp16_skips_the_steps_whose_gradients_overflow_and_goes_on(cuda, mnist):
    with trainings.built(cuda, "mnist", "--data-dir", mnist, "--precision", "fp16") as training:
        scaler = training.work.learner.scaler
        scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0**60})
        before = [p.detach().clone() for p in training.work.learner.model.parameters()]
        take(training, 1)
        after = list(training.work.learner.model.parameters())
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert scaler.get_scale() == 2.0**59
        losses = take(training, 60).losses
        assert torch.isfinite(losses).all()
        assert scaler.get_scale() < 2.0**40
        assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))


COMPILED = {
    "whole steps": ("spiral", "--dropout", "0"),
    "whole steps, sgd": ("spiral", "--dropout", "0", "--optimizer", "sgd", "--momentum", "0.9"),
    "a network with batch normalisation": ("cifar10", *TINY_WIDTH),
}


@pytest.mark.xdist_group("compiled")
@pytest.mark.parametrize("case", COMPILED)
def test_compiled_steps_are_the_eager_ones(cuda, ieee, case, cifar10):
    target, *flags = COMPILED[case]
    tolerance = 1e-9
    if target == "cifar10":
        flags, tolerance = [*flags, "--data-dir", cifar10], 1e-3
    else:
        flags += ["--precision", "fp64"]
    compiled, eager = (first_steps(cuda, target, *flags, "--compile", c) for c in ("on", "off"))
    assert len(compiled.losses) == 10
    assert_close(compiled.losses, eager.losses, tolerance)


@pytest.mark.xdist_group("compiled")
def test_a_compiled_model_trains_in_fp16(cuda, mnist):
    """The scaler decides on the host, so that the model alone is compiled."""
    flags = ("--data-dir", mnist, "--precision", "fp16")
    compiled, eager = (first_steps(cuda, "mnist", *flags, "--compile", c) for c in ("on", "off"))
    assert_close(compiled.losses, eager.losses, 0.05)


def test_data_too_large_for_the_device_trains_the_same(cuda, tmp_path, monkeypatch):
    recipe = tiny.write_recipe(tmp_path, CONVNET)
    resident = first_steps(cuda, recipe, steps=20)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (0, 1 << 30))
    held_by_the_host = first_steps(cuda, recipe, steps=20)
    assert torch.equal(resident.losses, held_by_the_host.losses)


@pytest.mark.gpu(dry=True)
@pytest.mark.parametrize("workers", [0, 2])
def test_data_read_by_a_loader_trains_as_data_in_memory(cuda, tmp_path, workers):
    held = first_steps(cuda, tiny.write_recipe(tmp_path, IN_MEMORY_PLAIN, "held.py"), steps=25)
    loaded = (cuda, tiny.write_recipe(tmp_path, IN_FILES, "loaded.py"), "--num-workers", workers)
    # A rank of its own: it forks its workers.
    (read,) = run_ranks(trainings.first_25_steps, 1, tmp_path / "rank", *loaded)
    assert torch.equal(held.losses, read.losses)
