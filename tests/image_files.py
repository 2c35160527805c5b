"""Small image folders, made from a seed with Pillow; and what may be wrong with a file."""

import struct
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("cat", "dog")


def pixels(seed: int, height: int = 20, width: int = 20) -> np.ndarray:
    """Return a smooth colour picture (height, width, 3), another one for each seed."""
    drawn = np.random.default_rng(seed)
    down, across = np.mgrid[0:height, 0:width] / max(height, width)
    waves = [np.sin(down * a + across * b) for a, b in drawn.uniform(-6, 6, (3, 2))]
    return (127.5 + 127 * np.stack(waves, axis=-1)).astype(np.uint8)


def write_images(
    root: Path, split: str = "train", *, count: int = 6, classes=CLASSES, size=(20, 20)
) -> Path:
    """Write a folder of PNGs and JPEGs: root/split/class/000.png and so on; return root."""
    for label, name in enumerate(classes):
        folder = root / split / name
        folder.mkdir(parents=True, exist_ok=True)
        for k in range(count):
            image = Image.fromarray(pixels(1000 * label + k + len(split), *size))
            image.save(folder / f"{k:03}.{'png' if k % 2 else 'JPG'}", quality=95)
    return root


def _truncated(path: Path) -> None:
    Image.fromarray(pixels(1, 64, 64)).save(path.with_suffix(".png"))
    content = path.with_suffix(".png").read_bytes()
    path.with_suffix(".png").unlink()
    path.write_bytes(content[: len(content) // 2])


def _truncated_jpeg(path: Path) -> None:
    Image.fromarray(pixels(1, 64, 64)).save(path, format="jpeg", quality=95)
    path.write_bytes(path.read_bytes()[:-200])


def _bad_checksum(path: Path) -> None:
    Image.fromarray(pixels(1)).save(path, format="png")
    content = bytearray(path.read_bytes())
    content[content.index(b"IDAT") + 4] ^= 0xFF
    path.write_bytes(content)


def _too_large(path: Path) -> None:
    chunk = b"IHDR" + struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    length, checksum = struct.pack(">I", 13), struct.pack(">I", zlib.crc32(chunk))
    header = b"\x89PNG\r\n\x1a\n" + length + chunk + checksum
    path.write_bytes(header + b"\0\0\0\0IDAT" + b"\0" * 8)


BROKEN = {
    "empty": (lambda path: path.write_bytes(b""), "it is empty"),
    "truncated": (_truncated, "it is truncated"),
    "truncated JPEG": (_truncated_jpeg, "it is truncated"),
    "text": (lambda path: path.write_text("<html>404</html>"), "recognise"),
    "noise": (lambda path: path.write_bytes(bytes(range(256))), "recognise"),
    "checksum": (_bad_checksum, "broken"),
    "a bomb": (_too_large, "DecompressionBomb"),
    "a folder": (lambda path: path.mkdir(), "Is a directory"),
    "a link to nothing": (lambda path: path.symlink_to(path.parent / "nothing"), "No such file"),
}
"""kind → what writes such a file, and a part of what is said of it."""
