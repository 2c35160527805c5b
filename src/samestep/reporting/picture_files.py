"""PNG files of small images, written without a library."""

import json
import os
import shutil
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samestep.run.files import cannot_write, read_object

SIGNATURE = b"\x89PNG\r\n\x1a\n"
_COLOUR_TYPES = {1: 0, 3: 2}  # grey, and red green blue


def png(pixels: bytes, width: int, height: int, channels: int) -> bytes:
    """Return a PNG file of rows from the top, each of pixels from the left, each of its channels.

    One channel is grey; three are red, green and blue.
    """
    row = width * channels
    assert len(pixels) == row * height
    # Each row begins with the filter that it was written with; 0 is none.
    rows = b"".join(b"\0" + pixels[k : k + row] for k in range(0, len(pixels), row))
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPES[channels], 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 6)), (b"IEND", b""))
    return SIGNATURE + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )


FOLDER = "pictures"
"""In a run directory."""
INDEX = "pictures.json"
FORMAT = 1
LIMIT_BYTES = 5_000_000
"""All pictures of a run together."""

_MOST_TEXT = 1000

Entry = dict[str, Any]
"""What pictures.json says of one picture: `name`, `kind` and `title` first."""


class Album:
    """The pictures of a run as they are made, up to `LIMIT_BYTES`."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.files: dict[str, bytes] = {}
        """File name → content."""
        self.images: dict[str, str] = {}
        """Name of a picture → its PNG file, which trackers take."""
        self._left = LIMIT_BYTES

    def add(
        self, entry: Entry, files: Mapping[str, bytes] | None = None, image: str | None = None
    ) -> None:
        """Keep a picture with its files, or a note in its place where there is no room for it.

        `image` names the file that trackers take.
        """
        files = files or {}
        size = sum(map(len, files.values())) + len(json.dumps(entry))
        if size > self._left:
            self.note(
                entry["name"],
                entry["title"],
                f"It takes {size / 1e6:.1f} MB, and {self._left / 1e6:.1f} MB of the "
                f"{LIMIT_BYTES / 1e6:.0f} MB for all pictures of a run are left: make it smaller.",
            )
            return
        self._left -= size
        self.files |= files
        if image is not None:
            self.images[entry["name"]] = image
        self.entries.append(entry)

    def copy(self) -> "Album":
        """Return what is here now, for whoever does not wait for the rest."""
        other = Album()
        other.entries, other.images = list(self.entries), dict(self.images)
        other.files = dict(self.files)  # after the entries, whose files are kept before them
        return other

    def note(self, name: str, title: str, text: str) -> None:
        """Say why there is no picture of this name."""
        text = text if len(text) <= _MOST_TEXT else f"{text[: _MOST_TEXT - 1]}…"
        self.entries.append({"name": name, "kind": "note", "title": title, "text": text})


def replace_pictures(run: Path, album: Album, *, checkpoint: str, split: str | None) -> None:
    """Write the pictures of a run, in place of those that it had."""
    folder, new, old = (run / name for name in (FOLDER, f".{FOLDER}.new", f".{FOLDER}.old"))
    index = {"format": FORMAT, "checkpoint": checkpoint, "split": split, "pictures": album.entries}
    try:
        for left in (new, old):  # by a kill
            shutil.rmtree(left, ignore_errors=True)
        if album.entries:
            new.mkdir()
            for name, content in album.files.items():
                (new / name).write_bytes(content)
            text = json.dumps(index, allow_nan=False, indent=1)
            (new / INDEX).write_text(text + "\n", encoding="utf-8")
        if folder.exists():  # a folder that is not empty cannot be replaced in one call
            folder.rename(old)
        if album.entries:
            new.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(new, ignore_errors=True)
        raise cannot_write(folder, error) from error


def read_pictures(run: Path) -> list[Entry]:
    """Return what pictures.json says of each picture; nothing where there is none to read."""
    found = read_object(run / FOLDER / INDEX)
    pictures = found.get("pictures")
    if found.get("format") != FORMAT or not isinstance(pictures, list):
        return []
    return [entry for entry in pictures if isinstance(entry, dict)]


def read_png(run: Path, path: str) -> bytes | None:
    """Return a PNG file of a run directory; None if it is gone, no PNG, or lies outside of it."""
    file = Path(os.path.realpath(run / path))
    if not file.is_relative_to(os.path.realpath(run)):
        return None
    try:
        with file.open("rb") as opened:
            content = opened.read(LIMIT_BYTES + 1)
    except OSError:
        return None
    return content if len(content) <= LIMIT_BYTES and content.startswith(SIGNATURE) else None
