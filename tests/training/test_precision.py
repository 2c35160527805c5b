"""The four precisions on the CPU: they train, on any ranks, and fp16's scaler is kept."""

import math
import signal

import pytest
import torch

from samestep import UserError, read_records
from samestep.training.device import check_precision, data_dtype
from tests import tiny
from tests.command_line import call
from tests.faults import Fault

WHOLE = ("--optimizer", "sgd", "--lr", "0.2", "--epochs", "3")


@pytest.fixture
def recipe(tmp_path):
    return tiny.write_recipe(tmp_path)


def train(recipe, folder, name, *flags, world_size=1):
    run = folder / name
    tiny.trained(recipe, run, *flags, on=world_size)
    return run


def losses(run):
    return [r["loss"] for r in read_records(run) if r["event"] == "step"]


def norms(run):
    return [r["grad_norm"] for r in read_records(run) if r["event"] == "step"]


def numbers(run):
    """Return every number of the records that training makes; one that JSON has not is None."""
    return [
        record[key]
        for record in tiny.account(run)
        for key in ("loss", "grad_norm", "lr", "accuracy")
        if key in record
    ]


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """A run in single precision on one rank."""
    folder = tmp_path_factory.mktemp("single")
    return train(tiny.write_recipe(folder), folder, "run", "--precision", "fp32", *WHOLE)


@pytest.mark.parametrize(
    ("precision", "tolerance", "world_size"), [("bf16", 0.05, 1), ("fp16", 0.01, 2)]
)
def test_half_precisions_train_as_single_precision_does_but_for_rounding(
    recipe, single, tmp_path, precision, tolerance, world_size
):
    half = train(recipe, tmp_path, "half", "--precision", precision, *WHOLE, world_size=world_size)
    assert len(losses(half)) == 33
    assert all(value is not None and math.isfinite(value) for value in numbers(half))
    assert losses(half) == pytest.approx(losses(single), rel=tolerance)
    assert norms(half) == pytest.approx(norms(single), rel=2 * tolerance), "as if never scaled"
    assert losses(half) != pytest.approx(losses(single), rel=1e-6), "it computed in fp32"
    weights = tiny.last_state(half)["model"]
    assert {value.dtype for value in weights.values()} == {torch.float32}
    assert (tiny.last_state(half)["scaler"] is None) == (precision != "fp16")


@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_in_bfloat16_train_and_resume_to_the_last_bit(recipe, single, tmp_path, world_size):
    flags = ("--precision", "bf16", "--param-dtype", "bf16", *WHOLE)
    half = train(recipe, tmp_path, "half", *flags, world_size=world_size)
    assert losses(half) == pytest.approx(losses(single), rel=0.1)
    state = tiny.last_state(half)
    assert {value.dtype for value in state["model"].values()} == {torch.bfloat16}
    short = train(recipe, tmp_path, "short", *flags, "--epochs", "2", world_size=world_size)
    tiny.resumed(short, "--epochs", "3", on=world_size)
    tiny.assert_same_training(short, half, tolerance=0)
    assert call("evaluate", str(half)) == 0


def test_double_precision_converts_model_and_data(recipe, single, tmp_path):
    double = train(recipe, tmp_path, "double", "--precision", "fp64", *WHOLE)
    assert losses(double) == pytest.approx(losses(single), rel=1e-5)
    assert losses(double) != pytest.approx(losses(single), rel=1e-11)
    for run, dtype in ((double, torch.float64), (single, torch.float32)):
        assert {value.dtype for value in tiny.last_state(run)["model"].values()} == {dtype}
        assert tiny.last_state(run)["scaler"] is None


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_scaler_of_fp16_is_saved_and_restored(recipe, tmp_path, world_size):
    """It counts the steps since its last change, so it shows whether a resume began anew."""
    flags = ("--precision", "fp16", "--checkpoint-sync", *WHOLE)  # the kill finds it written
    whole = train(recipe, tmp_path, "whole", *flags, world_size=world_size)
    run = tmp_path / "run"
    fault = Fault("after a step", nth=7, signum=signal.SIGKILL, rank=None)  # saved every 4 steps
    tiny.struck(recipe, run, fault, *flags, on=world_size)
    assert tiny.newest_announced(run) == 4
    assert tiny.last_state(run)["scaler"]["_growth_tracker"] == 4
    tiny.resumed(run, on=world_size)
    tiny.assert_same_training(run, whole, tolerance=0)
    assert tiny.last_state(run)["scaler"] == tiny.last_state(whole)["scaler"]
    assert tiny.last_state(run)["scaler"]["_growth_tracker"] == 33


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_whose_gradient_overflows_is_left_out_and_the_scale_halved(tmp_path, world_size):
    """On every rank alike: the steps that follow are those of one process."""
    text = tiny.RECIPE.replace(
        "cross_entropy(outputs, targets)", "cross_entropy(outputs, targets) * 30"
    )
    recipe = tiny.write_recipe(tmp_path, text)
    flags = ("--precision", "fp16", "--optimizer", "sgd", "--lr", "0.002", "--max-steps", "20")
    run = train(recipe, tmp_path, "run", *flags, world_size=world_size)
    assert all(loss is not None for loss in losses(run))
    state = tiny.last_state(run)
    skipped = sum(norm is None for norm in norms(run))
    assert 0 < skipped < 20
    assert state["scaler"]["scale"] == 65536 / 2**skipped
    assert all(bool(value.isfinite().all()) for value in state["model"].values())


def test_what_a_device_cannot_do_is_refused():
    with pytest.raises(UserError, match="float64"):
        check_precision("fp64", torch.device("mps"))
    for precision in ("fp32", "bf16", "fp16", "fp64"):
        check_precision(precision, torch.device("cpu"))


def test_only_double_precision_stores_doubles():
    kinds = {precision: data_dtype(precision) for precision in ("fp32", "bf16", "fp16", "fp64")}
    assert kinds.pop("fp64") is torch.float64
    assert set(kinds.values()) == {torch.float32}
