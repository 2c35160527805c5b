"""Turn an image file into a square of bytes, the same on every rank and in every worker.

Pillow is imported when the first image is read: it is an extra, and nothing else here needs it.
"""

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from samestep.base.errors import UserError
from samestep.core.data.keyed_random import uniform

if TYPE_CHECKING:
    from PIL import Image as PillowImage

# EXIF's tag 0x0112 says how the camera was held (JEITA CP-3451, "Orientation"). These are the names
# of Pillow's operations that undo 2 to 8; 1 is upright.
_ORIENTATION = 0x0112
_MAY_HOLD_EXIF = {"exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif"}
_OPERATIONS = "FLIP_LEFT_RIGHT ROTATE_180 FLIP_TOP_BOTTOM TRANSPOSE ROTATE_270 TRANSVERSE ROTATE_90"
_UPRIGHT = dict(enumerate(_OPERATIONS.split(), start=2))


class UnreadableImageError(ValueError):
    """A file that cannot be decoded; the message says why in a few words."""


def pillow() -> Any:
    """Return the module `PIL.Image`."""
    try:
        from PIL import Image  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise UserError(
            "Reading images needs Pillow, which is not installed. Install it with: "
            "pip install 'samestep[images]'"
        ) from error
    return Image


def decode(
    path: Path | str, side: int, *, draft: bool = True, exact: bool = False, on_white: bool = False
) -> Tensor:
    """Return the middle square of an image, upright and in RGB: (3, side, side) uint8.

    The shorter edge is resized to `side` (Pillow's bilinear filter, which averages when it makes
    smaller) and the rest of the longer one left out.

    Args:
        path: the file; its content tells the format, not its name.
        side: edge of the result in pixels.
        draft: decode a large JPEG at a fraction of its size (libjpeg's scaled DCT): several times
            faster, and within a few grey levels of the same.
        exact: take no image of another size.
        on_white: put white behind transparent pixels; else they have the colour that they hide.

    Raises:
        UnreadableImageError: the file is empty, truncated, no image, of a size that is not wanted,
            or may not be read.
        UserError: Pillow is not installed.
    """
    module = pillow()
    try:
        # Read whole, so that a truncated file fails here and not in Pillow's lazy reading.
        with open(path, "rb") as file:  # noqa: PTH123 - a tenth faster for a small image
            content = file.read()
        with module.open(io.BytesIO(content)) as image:
            if exact and image.size != (side, side):
                raise UnreadableImageError(f"it is {image.width}x{image.height}, not {side}x{side}")
            return _square(module, image, side, draft=draft, on_white=on_white)
    except UnreadableImageError:
        raise
    except Exception as error:  # Pillow's formats raise whatever their parsing meets
        raise UnreadableImageError(_why_unreadable(error, path)) from error


def decode_grey(path: Path | str, side: int) -> Tensor:
    """Return the middle square of an image in grey: (side, side) uint8; fails as `decode` does.

    The weights of red, green and blue are those of ITU-R BT.601, as Pillow's; what is grey already
    keeps its values. Behind transparent pixels is white, as behind a drawing on paper.
    """
    red, green, blue = decode(path, side, on_white=True).to(torch.int32)
    grey: Tensor = (299 * red + 587 * green + 114 * blue + 500) // 1000
    return grey.to(torch.uint8)


def shorter_edge(path: Path | str) -> int | None:
    """Return the shorter edge of an image in pixels, from its header; None if it has none."""
    module = pillow()
    try:
        with module.open(path) as image:
            return int(min(image.size))
    except Exception:  # the scan says later what is wrong with it
        return None


def _square(
    module: Any, image: "PillowImage.Image", side: int, *, draft: bool, on_white: bool
) -> Tensor:
    if draft:
        # A JPEG is decoded at 1/2, 1/4 or 1/8 of its size where that leaves twice the edge asked
        # for: the resize that follows then still averages over several pixels.
        image.draft(None, (2 * side, 2 * side))
    image.load()  # before the EXIF: to find a PNG's, Pillow would load it and hide what fails
    orientation = _orientation(image)
    rgb = _to_rgb(module, _on_white(module, image) if on_white else image)
    width, height = rgb.size
    if (width, height) != (side, side):
        edge = min(width, height)
        left, top = (width - edge) / 2, (height - edge) / 2
        box = (left, top, left + edge, top + edge)
        rgb = rgb.resize((side, side), module.Resampling.BILINEAR, box=box)
    if orientation in _UPRIGHT:  # last, on the fewest pixels: a square's middle stays its middle
        rgb = rgb.transpose(getattr(module.Transpose, _UPRIGHT[orientation]))
    return torch.from_numpy(np.array(rgb)).permute(2, 0, 1).contiguous()


def _orientation(image: "PillowImage.Image") -> int:
    """Return the EXIF orientation, 1 to 8; 1 if there is none that can be read."""
    if not _MAY_HOLD_EXIF & image.info.keys():
        return 1  # asking all the same would be a tenth of a small image's time
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # broken EXIF, good pixels
        return 1


def _on_white(module: Any, image: "PillowImage.Image") -> "PillowImage.Image":
    if "A" not in image.getbands() and "transparency" not in image.info:
        return image
    image = image.convert("RGBA")
    paper: PillowImage.Image = module.new("RGBA", image.size, "white")
    paper.alpha_composite(image)
    return paper


def _to_rgb(module: Any, image: "PillowImage.Image") -> "PillowImage.Image":
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I"):  # 16-bit grey, which Pillow would cut off at 255
        image = module.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # the palette's transparent colour has an RGB value there
    return image.convert("RGB")


def _why_unreadable(error: Exception, path: Path | str) -> str:
    """Say in a few words why a file could not be decoded, from what Pillow raised."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if Path(path).stat().st_size == 0:
        return "it is empty"
    text = str(error)
    if "cannot identify" in text:
        return "Pillow does not recognise it as an image"
    if "truncated" in text.lower():
        return "it is truncated"
    return f"{type(error).__name__}: {text}"


def stored_side(image_size: int) -> int:
    """Return the edge at which images are kept for a model that sees `image_size` pixels.

    Small images are kept as they are; of larger ones an eighth is left to crop from, as in the
    usual 256 for 224.
    """
    return image_size if image_size <= SMALL else math.ceil(image_size * 8 / 7)


def model_side(stored: int) -> int:
    """Return the edge that the model sees of images kept at `stored` pixels."""
    return stored if stored <= SMALL else stored * 7 // 8


SMALL = 64
"""The largest edge that counts as small: it is kept whole and cropped with padding."""

_LEAST_AREA = 0.25
"""Smallest part of the stored image in a crop. The usual 0.08 is for crops of the original file;
of what is kept here so small a part would be magnified more than threefold."""
_MOST_STRETCH = 1 / 3
"""A crop is at most this much wider than high or higher than wide: 3/4 to 4/3, as usual."""


def scaled_crops_and_flips(images: Tensor, keys: Tensor) -> Tensor:
    """Return a random part of each image, scaled to the size of the model, half of them mirrored.

    As in Szegedy et al. (2015), "Going deeper with convolutions", section 6: parts of random area
    and aspect ratio; from half-pixel centres by bilinear interpolation.

    Args:
        images: (batch, channels, stored side, stored side), uint8.
        keys: (batch,) int64.

    Returns:
        (batch, channels, model side, model side), float32 from 0 to 255.
    """
    draws = uniform(keys, 5)
    # Only operations that IEEE 754 defines to the last bit: exp and log may differ between the
    # body and the rest of a vector, and then a sample would depend on its place in the batch.
    area = _LEAST_AREA + (1 - _LEAST_AREA) * draws[:, 0]
    stretch = 1 + _MOST_STRETCH * (2 * draws[:, 1] - 1).abs()
    stretch = torch.where(draws[:, 1] < 0.5, 1 / stretch, stretch)
    width = (area * stretch).sqrt().clamp(max=1.0)
    height = (area / stretch).sqrt().clamp(max=1.0)
    left, top = (1 - width) * draws[:, 2], (1 - height) * draws[:, 3]
    side = model_side(images.shape[-1])
    centres = (torch.arange(side, device=images.device) + 0.5) / side
    mirrored = torch.where(draws[:, 4:] < 0.5, centres.flip(0), centres)
    across = left[:, None] + width[:, None] * mirrored
    down = top[:, None] + height[:, None] * centres
    shape = (len(images), side, side)
    grid = torch.stack((across[:, None].expand(shape), down[:, :, None].expand(shape)), dim=-1)
    return nn.functional.grid_sample(
        images.to(torch.float32), 2 * grid - 1, padding_mode="border", align_corners=False
    )


def middle(images: Tensor) -> Tensor:
    """Return the part of stored images (batch, channels, side, side) that an evaluation sees."""
    stored = images.shape[-1]
    side = model_side(stored)
    start = (stored - side) // 2
    return images[..., start : start + side, start : start + side]
