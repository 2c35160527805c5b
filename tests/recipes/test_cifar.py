"""CIFAR-10 from both kinds of files: the very pixels, or one message that says what to do."""

import itertools
import math
import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from samestep import read_records
from samestep.base.errors import UserError
from samestep.core.recipe import find_recipe
from samestep.core.recipes.cifar10 import CLASSES, Cifar10Options, read_cifar10
from samestep.core.recipes.resnet import resnet18
from tests import tiny
from tests.cifar_files import images_and_labels, records, write_binary, write_folders
from tests.command_line import read_json, train_here


def refusal(folder, split="train"):
    with pytest.raises(UserError) as caught:
        read_cifar10(folder, split)
    return " ".join(str(caught.value).split())


def test_the_binary_version_gives_every_record_in_the_order_of_its_files(tmp_path):
    images, labels = images_and_labels(11, seed=1)
    for number, (start, stop) in enumerate(itertools.pairwise((0, 2, 3, 7, 10, 11)), start=1):
        content = records(images[start:stop], labels[start:stop])
        (tmp_path / f"data_batch_{number}.bin").write_bytes(content)
    read, targets = read_cifar10(tmp_path, "train")
    assert (read.numpy() == images).all()
    assert targets.tolist() == labels.tolist()


def test_the_files_may_lie_where_their_archive_is_unpacked(tmp_path):
    write_binary(tmp_path / "cifar-10-batches-bin", num_test=7)
    (tmp_path / "batches.meta").write_bytes(b"")
    images, labels = read_cifar10(tmp_path, "test")
    assert (images.numpy() == images_and_labels(7, seed=5)[0]).all()
    assert labels.tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_a_folder_a_class_gives_the_same_pixels_and_labels(tmp_path):
    write_folders(tmp_path, ending="png")
    images, labels = read_cifar10(tmp_path, "train")
    expected, targets = images_and_labels(60, seed=0)
    order = np.argsort(targets, kind="stable")
    assert (images.numpy() == expected[order]).all()
    assert labels.tolist() == sorted(targets.tolist())


@pytest.mark.parametrize("name", ["data_batch_1", "batches.meta", "cifar-10-python.tar.gz"])
def test_the_python_version_is_refused_before_a_byte_of_it_runs(tmp_path, name):
    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "it ran"),))

    for folder in (tmp_path, tmp_path / "cifar-10-batches-py"):
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(pickle.dumps(Bomb()))
        message = refusal(tmp_path)
        (folder / name).unlink()
        assert name in message
        assert f"samestep data get cifar10 --data-dir {tmp_path}" in message
    assert not (tmp_path / "it ran").exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", " 0 bytes"),
        (bytes(3073 * 2 - 1), "6,145 bytes"),
        (bytes(3074 * 10), "CIFAR-100"),
        (bytes(3073) + b"\x0a" + bytes(3072), "label 10"),
    ],
    ids=["empty", "cut off", "CIFAR-100", "label"],
)
def test_a_file_of_the_wrong_size_or_label_is_named_with_what_was_expected(tmp_path, content, says):
    write_binary(tmp_path)
    (tmp_path / "data_batch_3.bin").write_bytes(content)
    message = refusal(tmp_path)
    assert f"{tmp_path}/data_batch_3.bin" in message
    assert says in message


def test_an_archive_that_is_not_unpacked_and_missing_files_are_told(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        message = refusal(folder)
        assert str(folder) in message
        assert "data_batch_1.bin" in message
        assert "train/CLASS/" in message
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(b"")
    assert f"samestep data get cifar10 --data-dir {tmp_path}" in refusal(tmp_path)
    write_binary(tmp_path)
    for number in (2, 5):
        (tmp_path / f"data_batch_{number}.bin").unlink()
    assert "data_batch_2.bin, data_batch_5.bin" in refusal(tmp_path)


SPOILED = {
    "class missing": (lambda cats, _: cats.rename(cats.parents[1] / "cats"), "train/cat, "),
    "class too many": (lambda cats, _: (cats.parent / "lion").mkdir(), "train/lion"),
    "empty class": (lambda cats, _: [p.unlink() for p in cats.iterdir()], "train/cat has no"),
    "empty file": (lambda _, first: first.write_bytes(b""), "0003.jpg: it is empty"),
    "other size": (lambda _, first: Image.new("RGB", (40, 32)).save(first), "40x32"),
}


@pytest.mark.parametrize(("spoil", "says"), SPOILED.values(), ids=SPOILED)
def test_what_is_wrong_with_class_folders_is_told_with_the_place(tmp_path, spoil, says):
    cats = write_folders(tmp_path) / "train" / "cat"
    spoil(cats, min(cats.iterdir()))
    assert says in refusal(tmp_path)


def test_only_the_first_of_many_bad_images_are_named_and_all_are_counted(tmp_path):
    write_folders(tmp_path)
    for name, content in (("dog", b""), ("ship", b"words")):
        for path in (tmp_path / "train" / name).iterdir():
            path.write_bytes(content)
    message = refusal(tmp_path)
    assert "12 of 60 images" in message
    assert "and 7 more" in message


def test_without_pillow_the_message_is_the_command_that_installs_it(tmp_path, monkeypatch):
    write_folders(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert "pip install 'samestep[images]'" in refusal(tmp_path)


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


def test_names_and_weights_begin_as_in_torchvision_and_the_shortcut_as_in_the_paper(monkeypatch):
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
    block = resnet18(10, stem="small", width=4).layer2[0]
    images = torch.randn(2, 4, 9, 7)
    shortcut, convolve, strides = block.downsample[0], nn.functional.conv2d, []
    expected = convolve(images, shortcut.weight, stride=2)
    monkeypatch.setattr(
        nn.functional, "conv2d", lambda *a, **k: strides.append((a, k)) or convolve(*a, **k)
    )
    torch.testing.assert_close(shortcut(images), expected)
    assert [(len(inputs), named) for inputs, named in strides] == [(2, {})]  # images and weight
