"""The pictures that a run saved: their files, and how the page shows them without fetching."""

import base64
import json
import os
import shutil
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from samestep.base.run.files import cannot_write, read_object
from samestep.base.table import Table
from samestep.base.words import number, percent, shortened, size

SIGNATURE = b"\x89PNG\r\n\x1a\n"
_COLOUR_TYPES = {1: 0, 3: 2}  # grey, and red green blue


def png(pixels: bytes, width: int, height: int, channels: int) -> bytes:
    """Return a PNG of rows from the top, of pixels from the left, of 1 (grey) or 3 channels."""
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
        """Keep a picture with its files, or a note in its place where there is no room for it."""
        files = files or {}
        length = sum(map(len, files.values())) + len(json.dumps(entry))
        if length > self._left:
            self.note(
                entry["name"],
                entry["title"],
                f"It has {size(length)}, but only {size(self._left)} of the {size(LIMIT_BYTES)} "
                "for all pictures of a run are left: make it smaller.",
            )
            return
        self._left -= length
        self.files |= files
        if image is not None:
            self.images[entry["name"]] = image
        self.entries.append(entry)

    def copy(self) -> "Album":
        """Return a copy of the album as it is now, for callers that do not wait for the rest."""
        other = Album()
        other.entries, other.images = list(self.entries), dict(self.images)
        other.files = dict(self.files)  # after the entries, whose files are kept before them
        return other

    def note(self, name: str, title: str, text: str) -> None:
        """Say why there is no picture of this name."""
        text = shortened(text, _MOST_TEXT)
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
    """Return the entries of pictures.json; none if there is no such file."""
    return _objects(_read_index(run).get("pictures"))


def _read_index(run: Path) -> dict[str, Any]:
    """Return pictures.json; nothing if it is of a newer format, or too large to be samestep's."""
    file = run / FOLDER / INDEX
    try:
        index = read_object(file) if file.stat().st_size <= LIMIT_BYTES else {}
    except OSError:
        return {}
    return index if index.get("format") == FORMAT else {}


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


_TYPES = {".png": "image/png", ".svg": "image/svg+xml", ".jpg": "image/jpeg"}


class Photograph(NamedTuple):
    """One sample's image."""

    source: str
    target: str
    predicted: str
    probability: str


class Scatter(NamedTuple):
    """Predicted values against actual ones, in a square of 0 to 100; y grows downwards."""

    points: list[tuple[float, float]]
    low: str
    high: str


@dataclass(kw_only=True)
class ShownPicture:
    """One picture; which fields are set follows from its kind."""

    name: str
    kind: str
    title: str
    text: str = ""
    source: str = ""
    """A data URL of the image."""
    html: str = ""
    """A recipe's own page; it is shown in a frame that may do nothing."""
    right: list[Photograph] | None = None
    wrong: list[Photograph] | None = None
    scatter: Scatter | None = None
    table: Table | None = None


@dataclass(frozen=True, kw_only=True)
class Gallery:
    """All pictures of a run, and of which checkpoint they are."""

    of: str
    pictures: list[ShownPicture]


class _Folder:
    """Reads files by their plain names, until too much was read."""

    def __init__(self, path: Path) -> None:
        self._path, self._left = path, LIMIT_BYTES

    def read(self, name: object) -> bytes | None:
        """Return a file of the folder; None if it is not there, or is not of this folder."""
        if not isinstance(name, str) or not name or Path(name).name != name:
            return None
        file = self._path / name
        try:
            if file.is_symlink() or file.stat().st_size > self._left:
                return None
            content = file.read_bytes()
        except (OSError, ValueError):  # a name may hold what no file's does
            return None
        self._left -= len(content)
        return content

    def url(self, name: object) -> str:
        """Return an image as a data URL; empty if it cannot be shown."""
        kind = _TYPES.get(Path(str(name)).suffix.lower())
        content = self.read(name) if kind else None
        return f"data:{kind};base64,{base64.b64encode(content).decode()}" if content else ""


def read_gallery(run: Path) -> Gallery | None:
    """Return the pictures that a run has saved; None if it has none."""
    index, folder = _read_index(run), _Folder(run / FOLDER)
    shown = [_picture(entry, folder) for entry in _objects(index.get("pictures"))]
    of = ", ".join(str(index[key]) for key in ("checkpoint", "split") if index.get(key))
    return Gallery(of=of, pictures=shown) if shown else None


def _objects(value: Any) -> list[Entry]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _picture(entry: Entry, folder: _Folder) -> ShownPicture:
    kind, name = str(entry.get("kind")), str(entry.get("name", ""))
    shown = ShownPicture(name=name, kind=kind, title=str(entry.get("title") or name or "picture"))
    shown.text = str(entry.get("text") or "")
    complete: object = False
    match kind:
        case "note":
            complete = True
        case "figure":
            complete = shown.source = folder.url(entry.get("file"))
        case "html":
            complete = shown.html = (folder.read(entry.get("file")) or b"").decode(errors="replace")
        case "images":
            shown.right, shown.wrong = (
                _photographs(entry.get(side), folder) for side in ("right", "wrong")
            )
            complete = True
        case "points":
            complete = shown.scatter = _scatter(entry.get("points"))
            if shown.scatter and not shown.text:
                drawn, of = len(shown.scatter.points), entry.get("of")
                more = f" of {of:,}" if isinstance(of, int) and of > drawn else ""
                shown.text = f"{drawn:,}{more} samples; on the line the prediction is exact."
        case "rows":
            rows = _objects(entry.get("rows"))
            if head := list(dict.fromkeys(str(key) for row in rows for key in row)):
                cells = [[number(row.get(key)) for key in head] for row in rows]
                complete = shown.table = Table(title=shown.title, columns=head, rows=cells)
    if not complete:
        shown.kind = "note"
        shown.text = f"This picture cannot be shown: its file or {FOLDER}/{INDEX} is damaged."
    return shown


def _photographs(entries: Any, folder: _Folder) -> list[Photograph]:
    photographs = []
    for entry in _objects(entries):
        if source := folder.url(entry.get("file")):
            target, predicted = (str(entry.get(key, "?")) for key in ("target", "predicted"))
            chance = entry.get("probability")
            shown = percent(chance) if isinstance(chance, int | float) else ""
            photographs.append(Photograph(source, target, predicted, shown))
    return photographs


def _scatter(points: Any) -> Scatter | None:
    """Return the points that are two finite numbers each, on the same scale both ways."""
    pairs = [
        (float(p[0]), float(p[1]))
        for p in (points if isinstance(points, list) else [])
        if isinstance(p, list) and len(p) == 2 and all(isinstance(v, int | float) for v in p)
    ]
    if not pairs:
        return None
    low, high = min(map(min, pairs)), max(map(max, pairs))
    span = (high - low) or 1.0
    places = [
        (round(100 * (a - low) / span, 2), round(100 - 100 * (p - low) / span, 2)) for a, p in pairs
    ]
    return Scatter(places, number(low), number(high))
