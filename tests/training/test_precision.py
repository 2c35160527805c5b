"""The four precisions on the CPU: they train, on any ranks, and fp16's scaler is kept."""

import math
from pathlib import Path

import pytest
import torch

from samestep import UserError, read_records
from samestep.core.learner.device import check_precision, data_dtype
from tests import tiny
from tests.command_line import call

pytestmark = pytest.mark.xdist_group("precision")  # the runs of two ranks are shared

WHOLE = ("--optimizer", "sgd", "--lr", "0.2", "--epochs", "2")
HALF = {
    "fp16": ("--precision", "fp16", *WHOLE),
    "bf16": ("--precision", "bf16", "--param-dtype", "bf16", *WHOLE),
}
OVERFLOWS = ("--precision", "fp16", "--optimizer", "sgd", "--lr", "0.002", "--max-steps", "20")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("precision")
    tiny.write_recipe(made)
    steep = tiny.RECIPE.replace("(outputs, targets)\ndef acc", "(outputs, targets) * 30\ndef acc")
    assert steep != tiny.RECIPE
    tiny.write_recipe(made, steep, "steep.py")
    return made


def train(folder, name, *flags, recipe="tiny"):
    tiny.trained(folder / f"{recipe}.py", folder / name, *flags)
    return folder / name


@pytest.fixture(scope="module")
def single(folder):
    return train(folder, "single", "--precision", "fp32", *WHOLE)


@pytest.fixture(scope="module")
def on_two(folder) -> Path:
    """Runs of two ranks: in half precisions, at once and gone on with, and one of overflows."""
    words = [[folder / "steep.py", "--run-dir", folder / "steep", *OVERFLOWS]]
    for name, flags in HALF.items():
        how = [folder / "tiny.py", *flags]
        words.append([*how, "--run-dir", folder / name])
        words.append([*how, "--run-dir", folder / f"{name} resumed", "--epochs", "1"])
    tiny.train_all(words, on=2, folder=folder)
    assert tiny.last_state(folder / "fp16 resumed")["scaler"]["_growth_tracker"] == 11
    again = [[folder / f"{name} resumed", "--resume", "--epochs", "2"] for name in HALF]
    tiny.train_all(again, on=2, folder=folder)
    return folder


def losses(run):
    return [r["loss"] for r in read_records(run) if r["event"] == "step"]


def norms(run):
    return [r["grad_norm"] for r in read_records(run) if r["event"] == "step"]


def test_other_precisions_train_as_single_precision_does_but_for_rounding(single, on_two, folder):
    alone = train(on_two, "alone", "--precision", "bf16", *WHOLE)
    for half, tolerance in ((alone, 0.05), (on_two / "fp16", 0.01)):
        assert len(losses(half)) == 22
        assert all(map(math.isfinite, losses(half) + norms(half)))
        assert losses(half) == pytest.approx(losses(single), rel=tolerance)
        assert norms(half) == pytest.approx(norms(single), rel=2 * tolerance), "as if never scaled"
        assert losses(half) != pytest.approx(losses(single), rel=1e-6), "it computed in fp32"
        weights = tiny.last_state(half)["model"]
        assert {value.dtype for value in weights.values()} == {torch.float32}
        assert (tiny.last_state(half)["scaler"] is None) == (half is alone)
    double = train(folder, "double", "--precision", "fp64", *WHOLE)
    assert losses(double) == pytest.approx(losses(single), rel=1e-5)
    assert losses(double) != pytest.approx(losses(single), rel=1e-11)
    for run, dtype in ((double, torch.float64), (single, torch.float32)):
        assert {value.dtype for value in tiny.last_state(run)["model"].values()} == {dtype}
        assert tiny.last_state(run)["scaler"] is None


def test_weights_in_bfloat16_and_the_scaler_of_fp16_resume_to_the_last_bit(on_two, single):
    half = on_two / "bf16"
    assert losses(half) == pytest.approx(losses(single), rel=0.1)
    weights = tiny.last_state(half)["model"]
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    tiny.assert_same_training(on_two / "bf16 resumed", half, tolerance=0)
    assert call("evaluate", str(half)) == 0
    whole, run = on_two / "fp16", on_two / "fp16 resumed"
    tiny.assert_same_training(run, whole, tolerance=0)
    assert tiny.last_state(run)["scaler"] == tiny.last_state(whole)["scaler"]
    assert tiny.last_state(run)["scaler"]["_growth_tracker"] == 22


def test_a_step_whose_gradient_overflows_is_left_out_and_the_scale_halved(on_two):
    """On any number of ranks the same steps, though DDP averages gradients as large as theirs."""
    runs = {1: train(on_two, "one", *OVERFLOWS, recipe="steep"), 2: on_two / "steep"}
    for run in runs.values():
        assert all(loss is not None for loss in losses(run))
        state, skipped = tiny.last_state(run), [norm is None for norm in norms(run)]
        assert 0 < sum(skipped) < 20
        assert skipped == [norm is None for norm in norms(runs[1])]
        assert state["scaler"]["scale"] == 65536 / 2 ** sum(skipped)  # as of a single process
        assert all(bool(value.isfinite().all()) for value in state["model"].values())


def test_what_a_device_cannot_do_is_refused_and_only_fp64_stores_doubles():
    with pytest.raises(UserError, match="float64"):
        check_precision("fp64", torch.device("mps"))
    for precision in ("fp32", "bf16", "fp16", "fp64"):
        check_precision(precision, torch.device("cpu"))
    kinds = {precision: data_dtype(precision) for precision in ("fp32", "bf16", "fp16", "fp64")}
    assert kinds.pop("fp64") is torch.float64
    assert set(kinds.values()) == {torch.float32}
