"""CIFAR-10 from both kinds of files: the very pixels, or one message that says what to do."""

import itertools
import os
import pickle
import sys

import numpy as np
import pytest
from PIL import Image

from samestep.errors import UserError
from samestep.recipes.cifar10 import read_cifar10
from tests.cifar_files import images_and_labels, records, write_binary, write_folders


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


def test_files_that_are_missing_are_named(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        message = refusal(folder)
        assert str(folder) in message
        assert "data_batch_1.bin" in message
        assert "train/CLASS/" in message
    write_binary(tmp_path)
    for number in (2, 5):
        (tmp_path / f"data_batch_{number}.bin").unlink()
    assert "data_batch_2.bin, data_batch_5.bin" in refusal(tmp_path)


def test_an_archive_that_is_not_unpacked_yet_says_how(tmp_path):
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(b"")
    assert f"samestep data get cifar10 --data-dir {tmp_path}" in refusal(tmp_path)


SPOILED = {
    "class missing": (lambda cats, _: cats.rename(cats.parents[1] / "cats"), "train/cat, "),
    "class too many": (lambda cats, _: (cats.parent / "lion").mkdir(), "train/lion"),
    "empty class": (lambda cats, _: [p.unlink() for p in cats.iterdir()], "train/cat has no"),
    "empty file": (lambda _, first: first.write_bytes(b""), "0003.jpg: it is empty"),
    "other size": (lambda _, first: Image.new("RGB", (40, 32)).save(first), "40 x 32"),
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
