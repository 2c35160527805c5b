"""Decoding: one square of bytes for each file, upright, in RGB, whatever the file is like."""

import numpy as np
import pytest
import torch
from PIL import Image

from samestep.data.images.decode import UnreadableImageError, decode, model_side, stored_side
from tests.image_files import BROKEN, pixels

BILINEAR = Image.Resampling.BILINEAR


def write(path, array, **options):
    Image.fromarray(array).save(path, **options)
    return path


def decoded(path, side=20):
    """Return a file as Pillow has it: (height, width, 3)."""
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
