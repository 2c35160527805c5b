"""The pictures that a run saved at its end, as the page shows them: nothing is fetched later."""

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from samestep.reporting.picture_files import FOLDER, INDEX, LIMIT_BYTES, Entry
from samestep.reporting.table import Table, number, percent

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
            found = file.read_bytes()
        except (OSError, ValueError):  # a name may hold what no file's does
            return None
        self._left -= len(found)
        return found

    def url(self, name: object) -> str:
        """Return an image as a data URL; empty if it cannot be shown."""
        kind = _TYPES.get(Path(str(name)).suffix.lower())
        found = self.read(name) if kind else None
        return f"data:{kind};base64,{base64.b64encode(found).decode()}" if found else ""


def read_gallery(run: Path) -> Gallery | None:
    """Return the pictures that a run has saved; None if it has none."""
    listed = run / FOLDER / INDEX
    try:
        if listed.stat().st_size > LIMIT_BYTES:
            return None
        told = json.loads(listed.read_bytes(), parse_constant=lambda _: None)
    except (OSError, ValueError, RecursionError):
        return None
    entries = told.get("pictures") if isinstance(told, dict) else None
    folder = _Folder(run / FOLDER)
    shown = [_picture(entry, folder) for entry in _objects(entries)]
    of = ", ".join(str(told[k]) for k in ("checkpoint", "split") if shown and told.get(k))
    return Gallery(of=of, pictures=shown) if shown else None


def _objects(found: Any) -> list[Entry]:
    """Return the tables of a list; none of what is no list."""
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _picture(entry: Entry, folder: _Folder) -> ShownPicture:
    kind, name = str(entry.get("kind")), str(entry.get("name", ""))
    shown = ShownPicture(name=name, kind=kind, title=str(entry.get("title") or name or "picture"))
    shown.text = str(entry.get("text") or "")
    whole: object = False
    match kind:
        case "note":
            whole = True
        case "figure":
            whole = shown.source = folder.url(entry.get("file"))
        case "html":
            whole = shown.html = (folder.read(entry.get("file")) or b"").decode(errors="replace")
        case "images":
            shown.right, shown.wrong = (
                _photographs(entry.get(side), folder) for side in ("right", "wrong")
            )
            whole = True
        case "points":
            whole = shown.scatter = _scatter(entry.get("points"))
            if shown.scatter and not shown.text:
                drawn, of = len(shown.scatter.points), entry.get("of")
                more = f" of {of:,}" if isinstance(of, int) and of > drawn else ""
                shown.text = f"{drawn:,}{more} samples; on the line the prediction is exact."
        case "rows":
            rows = _objects(entry.get("rows"))
            if head := list(dict.fromkeys(str(key) for row in rows for key in row)):
                cells = [[number(row.get(key)) for key in head] for row in rows]
                whole = shown.table = Table(title=shown.title, columns=head, rows=cells)
    if not whole:
        shown.kind = "note"
        shown.text = (
            f"This picture cannot be shown: its entry in {FOLDER}/{INDEX} or its file is damaged."
        )
    return shown


def _photographs(entries: Any, folder: _Folder) -> list[Photograph]:
    found = []
    for entry in _objects(entries):
        if source := folder.url(entry.get("file")):
            target, predicted = (str(entry.get(key, "?")) for key in ("target", "predicted"))
            chance = entry.get("probability")
            shown = percent(chance) if isinstance(chance, int | float) else ""
            found.append(Photograph(source, target, predicted, shown))
    return found


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
