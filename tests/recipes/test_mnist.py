"""The classes of MNIST's files and of Fashion-MNIST's; images in files of their own."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from samestep import UserError
from samestep.recipes.mnist import MnistOptions, data, read
from samestep.training.snapshot import check_classes
from tests.idx_files import write_mnist

DIGITS = [str(digit) for digit in range(10)]
# The first labels of its training set, as its publishers' files have them.
FASHION = [9, 0, 0, 3, 0, 2, 7, 2, 5, 5, 0, 9, 5, 5, 7, 9]


def test_fashion_mnist_has_its_own_class_names(tmp_path):
    options = MnistOptions(data_dir=str(write_mnist(tmp_path)))
    assert list(data(options).classes) == DIGITS
    path = tmp_path / "train-labels-idx1-ubyte.gz"
    content = bytearray(gzip.decompress(path.read_bytes()))
    content[8 : 8 + len(FASHION)] = bytes(FASHION)
    path.write_bytes(gzip.compress(bytes(content)))
    classes = data(options).classes
    assert (len(classes), classes[0], classes[9]) == (10, "T-shirt/top", "Ankle boot")


def test_a_checkpoint_of_an_earlier_version_knows_the_classes_by_their_numbers():
    check_classes({"classes": DIGITS}, ["T-shirt/top", *DIGITS[1:]])
    with pytest.raises(UserError, match="'cat'"):
        check_classes({"classes": ["cat", "dog"]}, ["dog", "cat"])


def drawn(seed: int = 0) -> np.ndarray:
    """Return an image as MNIST's are: light on a dark border."""
    image = np.zeros((28, 28), np.uint8)
    image[6:22, 8:20] = np.random.default_rng(seed).integers(0, 256, (16, 12))
    return image


def as_read(path: Path, image: Image.Image) -> np.ndarray:
    image.save(path)
    return read(MnistOptions(), path).numpy()


def test_digits_in_files_become_light_on_dark(tmp_path):
    """An image of the data saved as a file is read bit for bit; so is ink on paper."""
    image = drawn()
    for mode in ("L", "RGB", "RGBA"):
        whole = Image.fromarray(image).convert(mode)
        assert np.array_equal(as_read(tmp_path / f"{mode}.png", whole), image)
    assert np.array_equal(as_read(tmp_path / "ink.png", Image.fromarray(255 - image)), image)
    transparent = Image.fromarray(np.dstack([np.zeros((28, 28, 3), np.uint8), image]))
    assert np.array_equal(as_read(tmp_path / "no-paper.png", transparent), image)
    palette = Image.fromarray(255 - image).quantize(256)
    assert np.abs(as_read(tmp_path / "palette.png", palette).astype(int) - image).max() <= 8


def test_any_size_and_colour_is_read_as_28_x_28_grey(tmp_path):
    wide = Image.new("RGB", (300, 70), (255, 255, 0))
    wide.paste((0, 0, 255), (140, 20, 160, 50))
    found = as_read(tmp_path / "wide.jpg", wide)
    assert (found.shape, found.dtype) == ((28, 28), np.uint8)
    assert found[14, 14] > 200, "blue on yellow is dark on light"
    assert found[0, 0] < 40
