"""The classes of MNIST's files and of Fashion-MNIST's; images and points in files of their own."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from samestep.base.errors import UserError
from samestep.core.recipes import mnist, spiral
from samestep.core.training.snapshot import check_classes
from tests.idx_files import write_mnist

DIGITS = [str(digit) for digit in range(10)]
# The first labels of its training set, as its publishers' files have them.
FASHION = [9, 0, 0, 3, 0, 2, 7, 2, 5, 5, 0, 9, 5, 5, 7, 9]


def test_fashion_mnist_has_its_own_class_names(tmp_path):
    options = mnist.MnistOptions(data_dir=str(write_mnist(tmp_path)))
    assert list(mnist.data(options).classes) == DIGITS
    path = tmp_path / "train-labels-idx1-ubyte.gz"
    content = bytearray(gzip.decompress(path.read_bytes()))
    content[8 : 8 + len(FASHION)] = bytes(FASHION)
    path.write_bytes(gzip.compress(bytes(content)))
    classes = mnist.data(options).classes
    assert (len(classes), classes[0], classes[9]) == (10, "T-shirt/top", "Ankle boot")
    with pytest.raises(UserError, match="'cat'"):
        check_classes({"classes": ["cat", "dog"]}, ["dog", "cat"])


def drawn(seed: int = 0) -> np.ndarray:
    image = np.zeros((28, 28), np.uint8)
    image[6:22, 8:20] = np.random.default_rng(seed).integers(0, 256, (16, 12))
    return image


def as_read(path: Path, image: Image.Image) -> np.ndarray:
    image.save(path)
    return mnist.read(mnist.MnistOptions(), path).numpy()


def test_digits_of_any_size_and_colour_become_light_on_dark_28_x_28(tmp_path):
    image = drawn()
    for mode in ("L", "RGB", "RGBA"):
        whole = Image.fromarray(image).convert(mode)
        assert np.array_equal(as_read(tmp_path / f"{mode}.png", whole), image)
    assert np.array_equal(as_read(tmp_path / "ink.png", Image.fromarray(255 - image)), image)
    transparent = Image.fromarray(np.dstack([np.zeros((28, 28, 3), np.uint8), image]))
    assert np.array_equal(as_read(tmp_path / "no-paper.png", transparent), image)
    palette = Image.fromarray(255 - image).quantize(256)
    assert np.abs(as_read(tmp_path / "palette.png", palette).astype(int) - image).max() <= 8
    wide = Image.new("RGB", (300, 70), (255, 255, 0))
    wide.paste((0, 0, 255), (140, 20, 160, 50))
    found = as_read(tmp_path / "wide.jpg", wide)
    assert (found.shape, found.dtype) == ((28, 28), np.uint8)
    assert found[14, 14] > 200, "blue on yellow is dark on light"
    assert found[0, 0] < 40


@pytest.mark.parametrize("heading", ["", "x,y\n"])
def test_a_file_has_a_point_a_line_below_a_heading_or_not(tmp_path: Path, heading):
    file = tmp_path / "points.csv"
    file.write_text(f"{heading}1.5,2\n\n-3,4e-1\n")
    points = spiral.read(spiral.SpiralOptions(), file)
    assert torch.equal(torch.stack(points), torch.tensor([[1.5, 2.0], [-3.0, 0.4]]))


@pytest.mark.parametrize("line", ["1,2,3", "1", "one,two", "nan,1"])
def test_a_line_that_is_no_point_is_told_by_its_number(tmp_path, line):
    file = tmp_path / "points.csv"
    file.write_text(f"x,y\n1,2\n{line}\n")
    with pytest.raises(ValueError, match="line 3"):
        spiral.read(spiral.SpiralOptions(), file)


def idx_bytes(values):
    header = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
    return header + values.tobytes()


def write(path, values):
    path.parent.mkdir(parents=True, exist_ok=True)
    mnist.data = idx_bytes(values)
    path.write_bytes(gzip.compress(mnist.data) if path.suffix == ".gz" else mnist.data)
    return path


def fault_of(path):
    with pytest.raises(UserError) as caught:
        mnist.read_idx(path)
    message = str(caught.value)
    assert str(path) in message
    assert f"samestep data get mnist --data-dir {path.parent}" in message
    return message


@given(
    values=hnp.arrays(np.uint8, hnp.array_shapes(min_dims=0, max_dims=5, min_side=0)),
    packed=st.booleans(),
    name=st.sampled_from(["any.gz", "any"]),
)
def test_any_array_comes_back_as_it_was_written(tmp_path_factory, values, packed, name):
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(gzip.compress(idx_bytes(values)) if packed else idx_bytes(values))
    mnist.read = mnist.read_idx(path)
    np.testing.assert_array_equal(mnist.read, values, strict=True)
    assert mnist.read.flags.writeable


GOOD = idx_bytes(np.arange(12, dtype=np.uint8).reshape(3, 4))
BROKEN = {
    "a web page instead": (b"<html>", "not an IDX file"),
    "two bytes": (b"\0\0", "not an IDX file"),
    "floats": (b"\0\0\x0d\x01\0\0\0\x01abcd", "float32"),
    "unknown type": (b"\0\0\x77\x01", "unknown type"),
    "half a header": (GOOD[:9], "expected 12 bytes, found 9"),
    "a lost byte": (GOOD[:-1], "12 bytes of data, found 11"),
    "an added byte": (GOOD + b"x", "12 bytes of data, found 13"),
    "nothing": (b"", "empty"),
    "nothing, packed": (gzip.compress(b""), "empty"),
    "too many axes": (b"\0\0\x08\xff" + b"\0\0\0\x01" * 255 + b"x", "NumPy"),
    "gzip cut off": (gzip.compress(GOOD)[:-9], "damaged gzip"),
    "gzip with nonsense inside": (gzip.compress(GOOD)[:10] + b"\xff" * 20, "damaged gzip"),
    "gzip followed by nonsense": (gzip.compress(GOOD) + b"nonsense", "damaged gzip"),
}


@pytest.mark.parametrize(("content", "fault"), BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_named_with_its_fault(tmp_path, content, fault):
    path = tmp_path / "broken"
    path.write_bytes(content)
    assert fault in fault_of(path)


@pytest.mark.parametrize("name", ["missing", "."])
def test_a_file_that_cannot_be_opened_is_named_with_the_reason(tmp_path, name):
    """`.` is a folder; a file without permission takes the same way but root may read it."""
    with pytest.raises(UserError, match=r"No such file|Is a directory") as caught:
        mnist.read_idx(tmp_path / name)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("place", [".", "raw", "MNIST/raw", "FashionMNIST/raw"])
@pytest.mark.parametrize("spelling", ["train-images-idx3-ubyte", "train-images.idx3-ubyte"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_file_is_found_in_every_usual_place_and_spelling(tmp_path, place, spelling, suffix):
    path = write(tmp_path / place / f"{spelling}{suffix}", np.zeros(1, np.uint8))
    assert mnist.find_idx(tmp_path, "train-images-idx3-ubyte") == path


@pytest.mark.parametrize(
    ("kind", "told"),
    [("data", "not exist"), ("", "FashionMNIST/raw"), ("a file", "is a file")],
    ids=["no folder", "empty folder", "a file"],
)
def test_a_file_that_is_nowhere_gives_the_places_searched_and_the_command(tmp_path, kind, told):
    (tmp_path / "a file").touch()
    folder = tmp_path / kind
    with pytest.raises(UserError) as caught:
        mnist.find_idx(folder, "t10k-images-idx3-ubyte")
    assert "samestep data get mnist --data-dir" in str(caught.value)
    assert str(folder) in str(caught.value)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("images_shape", "labels_shape", "fault"),
    [
        ((5, 2, 3), (4,), "5 images but 4 labels"),
        ((5,), (5, 2, 3), r"shapes \(5,\) and \(5, 2, 3\)"),
        ((5, 2, 3), (5, 1), r"shapes \(5, 2, 3\) and \(5, 1\)"),
    ],
)
def test_images_and_labels_that_do_not_fit_are_named(tmp_path, images_shape, labels_shape, fault):
    write(tmp_path / "t10k-images-idx3-ubyte.gz", np.ones(images_shape, np.uint8))
    write(tmp_path / "t10k-labels-idx1-ubyte.gz", np.ones(labels_shape, np.uint8))
    with pytest.raises(UserError, match=fault) as caught:
        mnist.read_images_and_labels(tmp_path, "test")
    assert str(tmp_path / "t10k-images-idx3-ubyte.gz") in str(caught.value)
    assert str(tmp_path / "t10k-labels-idx1-ubyte.gz") in str(caught.value)


def test_images_and_labels_are_of_one_folder_and_none_is_guessed(tmp_path):
    """MNIST and Fashion-MNIST have equally many samples: only the folders tell them apart."""
    write(tmp_path / "train-images-idx3-ubyte", np.zeros((1, 2, 2), np.uint8))
    write(tmp_path / "FashionMNIST/raw/train-labels-idx1-ubyte", np.zeros(1, np.uint8))
    with pytest.raises(UserError, match="different folders"):
        mnist.read_images_and_labels(tmp_path, "train")
    for name in ("MNIST", "FashionMNIST"):
        write(tmp_path / name / "raw/train-labels-idx1-ubyte", np.zeros(1, np.uint8))
    with pytest.raises(UserError, match="twice") as caught:
        mnist.find_idx(tmp_path, "train-labels-idx1-ubyte")
    assert f"--data-dir {tmp_path / 'MNIST/raw'}" in str(caught.value)
    own = write(tmp_path / "train-labels-idx1-ubyte.gz", np.zeros(1, np.uint8))
    assert mnist.find_idx(tmp_path, "train-labels-idx1-ubyte") == own, (
        "the folder itself goes first"
    )
