"""The recipe cifar10 from the command line, on small files."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from samestep import read_records
from samestep.errors import UserError
from samestep.recipe import find_recipe
from samestep.recipes.cifar10 import CLASSES, Cifar10Options
from samestep.recipes.resnet import resnet18
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
    settings = Path(__file__).parents[2] / "examples" / "cifar10_fast.toml"
    flags = ("--compile", "off", "--max-steps", "3", "--warmup-steps", "2", "--sync-batchnorm")
    folder = train(binary, tmp_path, "--config", str(settings), *flags)
    assert len(losses(folder)) == 3
    assert "0.weight" in tiny.last_state(folder)["model"], "the small network"
    (start,) = [record for record in read_records(folder) if record["event"] == "start"]
    assert (start["precision"], start["base_lr"], start["num_samples"]) == ("bf16", 0.8, 98)
    assert any("--sync-batchnorm" in note for note in start["notes"]), "it has no effect"


def test_a_run_goes_on_in_another_layout_with_activations_computed_again(binary, tmp_path):
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


@pytest.mark.parametrize(
    ("stem", "num_classes", "parameters", "side", "final"),
    # torchvision's resnet18 has 11,689,512; the small one is what others train on CIFAR-10.
    [("large", 1000, 11_689_512, 224, 7), ("small", 10, 11_173_962, 32, 4)],
)
def test_it_has_the_known_parameters_and_sizes(stem, num_classes, parameters, side, final):
    model = resnet18(num_classes, stem=stem)
    assert sum(p.numel() for p in model.parameters()) == parameters
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len([m for m in layers if getattr(m, "kernel_size", 0) != (1, 1)]) == 18
    narrow, shapes = resnet18(3, stem=stem, width=2), []
    narrow.layer4.register_forward_hook(lambda _m, _i, out: shapes.append(out.shape))
    assert narrow(torch.zeros(2, 3, side, side)).shape == (2, 3)
    assert shapes == [(2, 16, final, final)]


def test_names_are_those_of_torchvision_and_weights_begin_as_those_of_he_et_al():
    names = set(resnet18(1000, stem="large", width=1).state_dict())
    assert {"bn1.running_var", "layer4.1.bn2.bias", "layer2.0.downsample.0.weight"} <= names
    assert len(names) == 122
    assert "layer1.0.downsample.0.weight" not in names
    with pytest.raises(ValueError, match="'small' or 'large'"):
        resnet18(10, stem="medium")
    torch.manual_seed(0)
    model = resnet18(10, stem="small")
    for name in ("layer1.0.conv1", "layer3.0.conv1", "layer4.1.conv2"):
        weight = model.get_submodule(name).weight
        expected = math.sqrt(2 / (weight.shape[0] * 9))
        assert float(weight.detach().std()) == pytest.approx(expected, rel=0.05), name


def test_the_shortcut_is_the_convolution_of_the_paper_with_its_stride_taken_before(monkeypatch):
    """On the CPU, where PyTorch's own 1 x 1 convolution with a stride can crash."""
    block = resnet18(10, stem="small", width=4).layer2[0]
    images = torch.randn(2, 4, 9, 7)
    shortcut, convolve, strides = block.downsample[0], nn.functional.conv2d, []
    expected = convolve(images, shortcut.weight, stride=2)
    monkeypatch.setattr(
        nn.functional, "conv2d", lambda *a, **k: strides.append((a, k)) or convolve(*a, **k)
    )
    torch.testing.assert_close(shortcut(images), expected)
    assert [(len(inputs), named) for inputs, named in strides] == [(2, {})]  # images and weight
