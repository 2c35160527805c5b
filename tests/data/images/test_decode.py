"""Which files of a folder are samples, and decoding: one upright square of RGB for each file."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from samestep import UserError
from samestep.core.data.images.decode import UnreadableImageError, decode, model_side, stored_side
from samestep.core.data.images.image_files import class_names, find_files
from tests.image_files import BROKEN, CLASSES, pixels, write_images

BILINEAR = Image.Resampling.BILINEAR


def write(path, array, **options):
    Image.fromarray(array).save(path, **options)
    return path


def decoded(path, side=20):
    found = decode(path, side)
    assert found.dtype == torch.uint8
    return found.permute(1, 2, 0).numpy()


@pytest.mark.parametrize(("height", "width"), [(30, 30), (30, 90), (90, 30)])
def test_the_middle_square_is_taken_and_resized(tmp_path, height, width):
    array = pixels(4, height, width)
    path = write(tmp_path / "a.png", array)
    whole = Image.fromarray(array).resize((width * 2 // 3, height * 2 // 3), BILINEAR)
    expected = np.asarray(whole)[height // 3 - 10 :, width // 3 - 10 :][:20, :20]
    assert np.array_equal(decoded(path), expected)
    if height == width:
        assert np.array_equal(decoded(path, 30), array), "of the right size: every byte is kept"


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_stands_upright_however_the_camera_was_held(tmp_path, orientation):
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = orientation
    path = write(tmp_path / "a.png", pixels(5, 32, 24), exif=exif)
    with Image.open(path) as image:
        upright = write(tmp_path / "b.png", np.asarray(ImageOps.exif_transpose(image)))
    difference = decode(path, 16).int() - decode(upright, 16).int()
    assert difference.abs().max() <= 1, "the mirrored resize may round the other way"


def modes():
    rgb = Image.fromarray(pixels(6))
    see_through = rgb.copy()
    see_through.putalpha(90)
    palette = rgb.quantize(16)
    return {
        "L": (rgb.convert("L"), {}),
        "LA": (rgb.convert("LA"), {}),
        "1": (rgb.convert("1"), {}),
        "RGBA": (see_through, {}),
        "P": (palette, {}),
        "P with a transparent colour": (palette, {"transparency": 3}),
        "P with transparent colours": (palette, {"transparency": bytes(16)}),
    }


@pytest.mark.parametrize("name", modes())
def test_every_mode_becomes_rgb_with_the_colours_it_has(tmp_path, name):
    image, options = modes()[name]
    image.save(tmp_path / "a.png", **options)
    assert np.array_equal(decoded(tmp_path / "a.png"), np.asarray(image.convert("RGB")))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_unusual_files_are_read(tmp_path):
    """16 bits of grey keep their upper eight; the content tells the format, not the name."""
    deep = (np.arange(400, dtype=np.uint16) * 160).reshape(20, 20)
    assert np.array_equal(decoded(write(tmp_path / "deep.png", deep))[:, :, 1], deep >> 8)
    named = write(tmp_path / "named.jpg", pixels(8), format="png")
    assert np.array_equal(decoded(named), pixels(8))
    broken = write(tmp_path / "a.jpg", pixels(10), exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert decoded(broken).shape == (20, 20, 3)
    for_print = tmp_path / "print.jpg"
    Image.fromarray(pixels(7)).convert("CMYK").save(for_print, quality=95)
    assert np.abs(decoded(for_print).astype(float) - pixels(7)).mean() < 4


@pytest.mark.parametrize("side", [40, 90, 160])
def test_a_large_jpeg_decoded_at_a_fraction_is_nearly_the_same(tmp_path, side):
    path = write(tmp_path / "a.jpg", pixels(9, 700, 1000), quality=95)
    difference = (decode(path, side).int() - decode(path, side, draft=False).int()).abs()
    assert difference.float().mean() < 1.0
    assert difference.max() <= 8


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_wrong_with_a_file_is_said_in_a_few_words(tmp_path, kind):
    write_it, says = BROKEN[kind]
    write_it(tmp_path / "a.jpg")
    with pytest.raises(UnreadableImageError) as caught:
        decode(tmp_path / "a.jpg", 20)
    assert says in str(caught.value)
    assert str(tmp_path) not in str(caught.value), "whoever tells of it names the file"


@pytest.mark.parametrize("size", [8, 32, 64, 65, 100, 160, 224, 333, 1024])
def test_the_stored_size_leads_back_to_the_size_of_the_model(size):
    stored = stored_side(size)
    assert model_side(stored) == size
    assert stored == size if size <= 64 else stored <= size * 8 / 7 + 1


def names(files):
    return [files.name(k) for k in range(len(files))]


def test_files_come_sorted_by_class_and_name_with_their_labels(tmp_path):
    root = write_images(tmp_path, count=2)
    assert class_names(root) == CLASSES
    files = find_files(root, "train", CLASSES)
    found = [f"train/{c}/{n}" for c in CLASSES for n in ("000.JPG", "001.png")]
    assert names(files) == found
    assert files.labels.tolist() == [0, 0, 1, 1]
    assert Path(files.path(3)) == root / found[3]
    assert names(files.take([3, 0])) == [found[3], found[0]]


def test_endings_count_in_any_case_and_other_files_do_not(tmp_path):
    root = write_images(tmp_path, count=1)
    for name in ("a.JPEG", "b.Png", "c.gif", "notes.txt", "._000.jpg", ".hidden.png", "d.jpg.part"):
        (root / "train" / "cat" / name).write_bytes(b"x")
    for name in (".cache", "__MACOSX/cat"):
        (root / "train" / name).mkdir(parents=True)
    (root / "train" / "README.md").write_text("x")
    assert class_names(root) == CLASSES
    found = [Path(name).name for name in names(find_files(root, "train", CLASSES))]
    assert found == ["000.JPG", "a.JPEG", "b.Png", "000.JPG"]


@pytest.mark.parametrize("name", ["val", "validation"])
def test_the_validation_folder_has_two_names_and_may_lack_a_class(tmp_path, name):
    write_images(tmp_path)
    assert find_files(tmp_path, "validation", CLASSES) is None
    write_images(tmp_path, name, classes=CLASSES[:1], count=3)
    assert find_files(tmp_path, "validation", CLASSES).labels.tolist() == [0, 0, 0]


def refusal(root, split="train"):
    with pytest.raises(UserError) as caught:
        find_files(root, split, class_names(root))
    return str(caught.value)


def test_folders_that_are_missing_single_empty_or_not_text_are_refused(tmp_path):
    assert "train/CLASS/*.jpg" in refusal(tmp_path / "none")
    (tmp_path / "file").write_text("x")
    assert "is a file" in refusal(tmp_path / "file")
    assert "train/" in refusal(tmp_path)
    (tmp_path / "train").mkdir()
    assert "no folders" in refusal(tmp_path)
    write_images(tmp_path, classes=CLASSES[:1])
    assert "cat/" in refusal(tmp_path)
    write_images(tmp_path)
    (tmp_path / "train" / "bird").mkdir()
    assert "train/bird has no images" in refusal(tmp_path)
    (tmp_path / "train" / "bird" / "a.webp").write_bytes(b"x")
    assert "a.webp" in refusal(tmp_path)
    os.mkdir(os.fsencode(tmp_path / "train") + b"/\xff\xfe")  # noqa: PTH102
    assert r"'\udcff\udcfe'" in refusal(tmp_path)


def test_a_split_without_images_or_with_another_class_or_twice_is_refused(tmp_path):
    write_images(tmp_path)
    write_images(tmp_path, "val", classes=("dog", "emu"))
    message = refusal(tmp_path, "validation")
    assert "val/emu " in message
    assert "cat, dog" in message
    (tmp_path / "test" / "cat").mkdir(parents=True)
    assert "test has no images" in refusal(tmp_path, "test")
    (tmp_path / "validation").mkdir()
    assert "both val/ and validation/" in refusal(tmp_path, "validation")


def test_a_folder_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    write_images(tmp_path)
    real = os.scandir

    def refuse(path):
        if str(path).endswith("dog"):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert re.search("train/dog .*Permission denied", refusal(tmp_path))
