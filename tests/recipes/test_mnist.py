"""The classes of MNIST's files, and of Fashion-MNIST's, which have the same names and sizes."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from samestep import UserError
from samestep.recipes.mnist import MnistOptions, data
from samestep.training.snapshot import check_classes
from tests.idx_files import write_mnist

DIGITS = [str(digit) for digit in range(10)]
# The first labels of its training set, as its publishers' files have them.
FASHION = [9, 0, 0, 3, 0, 2, 7, 2, 5, 5, 0, 9, 5, 5, 7, 9]


def label(folder: Path, first: list[int]) -> None:
    """Give the first training images these labels."""
    path = folder / "train-labels-idx1-ubyte.gz"
    content = bytearray(gzip.decompress(path.read_bytes()))
    content[8 : 8 + len(first)] = np.array(first, dtype=np.uint8).tobytes()
    path.write_bytes(gzip.compress(bytes(content)))


def test_fashion_mnist_has_its_own_class_names(tmp_path):
    folder = write_mnist(tmp_path / "data")
    assert list(data(MnistOptions(data_dir=str(folder))).classes) == DIGITS
    label(folder, FASHION)
    classes = data(MnistOptions(data_dir=str(folder))).classes
    assert len(classes) == 10
    assert (classes[0], classes[9]) == ("T-shirt/top", "Ankle boot")


def test_a_checkpoint_of_an_earlier_version_knows_the_classes_by_their_numbers():
    check_classes({"classes": DIGITS}, ["T-shirt/top", *DIGITS[1:]])
    with pytest.raises(UserError, match="'cat'"):
        check_classes({"classes": ["cat", "dog"]}, ["dog", "cat"])
