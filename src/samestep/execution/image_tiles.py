"""Stored images as small PNG files, one by one and beside each other."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from samestep.run.png import png

_LEAST_SIDE, _MOST_SIDE = 8, 4096
_TILE = 128
"""Pixels of the longer side at most."""
_SEEN = 48
"""Pixels that a tile of a sheet has at least: digits of 28 would be hard to see."""
_COLUMNS, _FRAME, _GAP = 8, 2, 4
_GREEN, _RED = (46, 125, 50), (198, 40, 40)


def is_image(stored: Any) -> bool:
    """Whether an input, as it is stored, is an image: rows and columns, grey or in three colours.

    Floats of two dimensions may be a table or a time series, unless they are square.
    """
    if not isinstance(stored, Tensor) or stored.layout != torch.strided:
        return False
    if stored.dtype != torch.uint8 and not stored.is_floating_point():
        return False
    if stored.dim() == 2:
        sides = tuple(stored.shape)
        if stored.dtype != torch.uint8 and sides[0] != sides[1]:
            return False
    elif stored.dim() == 3 and stored.shape[0] in (1, 3):
        sides = tuple(stored.shape[1:])
    elif stored.dim() == 3 and stored.shape[2] in (1, 3):
        sides = tuple(stored.shape[:2])
    else:
        return False
    return all(_LEAST_SIDE <= side <= _MOST_SIDE for side in sides)


def tile_of(stored: Tensor) -> Tensor:
    """Return an image as (rows, columns, 3) uint8 on the CPU, its longer side 128 at most."""
    image = stored.detach().cpu()
    if image.dim() == 2:
        image = image.unsqueeze(0)
    elif image.shape[0] not in (1, 3):
        image = image.permute(2, 0, 1)
    image = _as_bytes(image) if image.dtype != torch.uint8 else image.to(torch.float32)
    rows, columns = image.shape[1:]
    if max(rows, columns) > _TILE:
        scale = _TILE / max(rows, columns)
        size = [max(1, round(rows * scale)), max(1, round(columns * scale))]
        image = interpolate(image[None], size=size, mode="area")[0]
    return image.round().clamp(0, 255).to(torch.uint8).expand(3, -1, -1).permute(1, 2, 0)


def _as_bytes(image: Tensor) -> Tensor:
    """Return floats from 0 to 255; those in no usual range are spread over all of it."""
    image = image.to(torch.float32).nan_to_num(0.0, 0.0, 0.0)
    low, high = float(image.min()), float(image.max())
    if low >= 0 and high <= 1:
        return image * 255
    if low >= 0 and high <= 255:
        return image
    return (image - low) * (255 / max(high - low, 1e-12))


def png_of(tile: Tensor) -> bytes:
    """Return (rows, columns, 3) uint8 as a PNG file; one of grey tones alone takes a third."""
    rows, columns = tile.shape[:2]
    grey = bool((tile == tile[..., :1]).all())
    pixels = tile[..., 0] if grey else tile
    return png(pixels.contiguous().numpy().tobytes(), columns, rows, 1 if grey else 3)


def sheet_of(right: Sequence[Tensor], wrong: Sequence[Tensor]) -> bytes:
    """Return one PNG file: the right tiles framed in green, below them the wrong ones in red."""
    shapes = [tile.shape for tile in (*right, *wrong)]
    side = max(max(shape[:2]) for shape in shapes)
    factor = -(-_SEEN // side) if side < _SEEN else 1
    row_pitch, column_pitch = (
        max(shape[axis] for shape in shapes) * factor + 2 * _FRAME + _GAP for axis in (0, 1)
    )
    groups = [(tiles, colour) for tiles, colour in ((right, _GREEN), (wrong, _RED)) if tiles]
    columns = min(_COLUMNS, max(len(tiles) for tiles, _ in groups))
    lines = [
        (tiles[k : k + columns], colour)
        for tiles, colour in groups
        for k in range(0, len(tiles), columns)
    ]
    size = (_GAP + len(lines) * row_pitch, _GAP + columns * column_pitch, 3)
    sheet = torch.full(size, 255, dtype=torch.uint8)
    for line, (tiles, colour) in enumerate(lines):
        for place, tile in enumerate(tiles):
            large = tile.repeat_interleave(factor, 0).repeat_interleave(factor, 1)
            framed = torch.tensor(colour, dtype=torch.uint8).repeat(
                large.shape[0] + 2 * _FRAME, large.shape[1] + 2 * _FRAME, 1
            )
            framed[_FRAME:-_FRAME, _FRAME:-_FRAME] = large
            top, left = _GAP + line * row_pitch, _GAP + place * column_pitch
            sheet[top : top + framed.shape[0], left : left + framed.shape[1]] = framed
    return png_of(sheet)
