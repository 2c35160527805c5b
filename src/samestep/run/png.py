"""PNG files of small images, written without a library."""

import struct
import zlib

SIGNATURE = b"\x89PNG\r\n\x1a\n"
_COLOUR_TYPES = {1: 0, 3: 2}  # grey, and red green blue


def png(pixels: bytes, width: int, height: int, channels: int) -> bytes:
    """Return a PNG file.

    Args:
        pixels: rows from the top, in each the pixels from the left, in each its channels.
        width: pixels of a row.
        height: rows.
        channels: bytes of a pixel: 1 is grey, 3 is red, green and blue.
    """
    row = width * channels
    assert len(pixels) == row * height
    # Each row begins with the filter that it was written with; 0 is none.
    rows = b"".join(b"\0" + pixels[k : k + row] for k in range(0, len(pixels), row))
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPES[channels], 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 6)), (b"IEND", b""))
    return SIGNATURE + b"".join(_chunk(kind, data) for kind, data in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
