"""The recipe cifar10 from the command line, on small files."""

from pathlib import Path

import pytest
import torch

from samestep import UserError, read_records
from samestep.recipe import find_recipe
from samestep.recipes.cifar10 import CLASSES, Cifar10Options
from tests import tiny
from tests.cifar_files import write_binary
from tests.command_line import read_json, train_here

# One thread: two that wait for each other are no faster on a network of this size.
SMALL = ("--width", "2", "--batch-size", "10", "--log-every", "1", "--threads", "1")


@pytest.fixture(scope="module")
def binary(tmp_path_factory):
    return write_binary(tmp_path_factory.mktemp("binary"))


def train(data_dir, folder, *flags, name="run"):
    run = folder / name
    train_here("cifar10", "--data-dir", str(data_dir), "--run-dir", str(run), *SMALL, *flags)
    return run


def losses(run):
    return [record["loss"] for record in read_records(run) if record["event"] == "step"]


def test_validation_is_carved_from_the_training_set_by_seed(binary):
    def load(**options):
        return find_recipe("cifar10").load_data(Cifar10Options(data_dir=str(binary), **options))

    splits = load()
    sizes = [len(part[0]) for part in (splits.train, splits.validation, splits.test)]
    assert sizes == [90, 10, 30]
    assert {part[0].dtype for part in (splits.train, splits.test)} == {torch.uint8}
    assert torch.equal(load().validation[0], splits.validation[0])
    assert not torch.equal(load(split_seed=1).validation[0], splits.validation[0])
    both = torch.cat([splits.train[0], splits.validation[0]]).flatten(1)
    assert len(both.unique(dim=0)) == 100, "no sample is in both, none is lost"
    assert any("100" in note and "50,000" in note for note in splits.notes), "it is a part of it"


def test_it_trains_and_tells_each_class(binary, tmp_path):
    folder = train(binary, tmp_path, "--epochs", "4", "--width", "8")
    test = read_json(folder / "result.json")["test"]
    assert list(test["per_class"]) == list(CLASSES)
    assert [sum(row) for row in test["confusion"]] == [3] * 10, "each test sample once"
    assert tiny.last_state(folder)["classes"] == list(CLASSES)
    assert test["accuracy"] >= 0.3, "the colours of the images tell the class; chance: 0.1"


def test_the_settings_file_of_the_fast_training_is_accepted(binary, tmp_path):
    """Without compiling, which takes a minute on a CPU; with a flag that needs more ranks."""
    settings = Path(__file__).parents[2] / "examples" / "cifar10_fast.toml"
    flags = ("--compile", "off", "--max-steps", "3", "--warmup-steps", "2", "--sync-batchnorm")
    folder = train(binary, tmp_path, "--config", str(settings), *flags)
    assert len(losses(folder)) == 3
    assert "0.weight" in tiny.last_state(folder)["model"], "the small network"
    (start,) = [record for record in read_records(folder) if record["event"] == "start"]
    assert (start["precision"], start["base_lr"], start["num_samples"]) == ("bf16", 0.8, 98)
    assert any("--sync-batchnorm" in note for note in start["notes"]), "it has no effect"


def test_a_run_goes_on_in_another_layout_with_activations_computed_again(binary, tmp_path):
    """In float64, so that it is told apart from momentum that lies at the wrong weights."""
    flags = ("--precision", "fp64", "--epochs", "2", "--batch-size", "30")
    whole = train(binary, tmp_path, *flags, name="whole")
    kept = ("--checkpoint-every-steps", "1", "--keep-top-k", "1")
    part = train(binary, tmp_path, *flags, *kept, name="part")
    assert read_json(part / "checkpoints" / "index.json")["last"]["step"] == 6
    more = ("--resume", "--epochs", "3")
    train_here(str(whole), *more)
    train_here(str(part), *more, "--no-channels-last", "--checkpoint-activations")
    assert len(losses(part)) == 9
    assert losses(part)[6:] == pytest.approx(losses(whole)[6:], rel=1e-9)


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("width", 0, "--width is 0"),
        ("validation_fraction", 1.0, "--validation-fraction is 1.0"),
        ("validation_fraction", 0.0, "--validation-fraction is 0.0"),
    ],
)
def test_a_bad_option_is_named_with_its_value(option, value, told):
    with pytest.raises(UserError, match=told):
        find_recipe("cifar10").load_data(Cifar10Options(**{option: value}))
