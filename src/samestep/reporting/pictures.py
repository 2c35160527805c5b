"""The pictures that a run saved at its end, as the page shows them: nothing is fetched later."""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samestep.reporting.table import Table, number, percent

FOLDER = "pictures"
MOST_BYTES = 5_000_000
"""Of all files of a run: more than this a run does not save."""
_TYPES = {".png": "image/png", ".svg": "image/svg+xml", ".jpg": "image/jpeg"}


@dataclass(frozen=True, kw_only=True)
class Photograph:
    """One sample's image."""

    source: str
    target: str
    predicted: str
    probability: str


@dataclass(frozen=True, kw_only=True)
class Scatter:
    """Predicted values against actual ones, in a square of 0 to 100; y grows downwards."""

    points: tuple[tuple[float, float], ...]
    low: str
    high: str
    diagonal: bool = True


@dataclass(frozen=True, kw_only=True)
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
    right: tuple[Photograph, ...] = ()
    wrong: tuple[Photograph, ...] = ()
    scatter: Scatter | None = None
    table: Table | None = None


@dataclass(frozen=True, kw_only=True)
class Gallery:
    """All pictures of a run, and of which checkpoint they are."""

    of: str
    pictures: tuple[ShownPicture, ...] = ()


@dataclass
class _Folder:
    """Reads files by their plain names, until too much was read."""

    path: Path
    left: int = field(default=MOST_BYTES)

    def read(self, name: object) -> bytes | None:
        """Return a file of the folder; None if it is not there, or is not of this folder."""
        if not isinstance(name, str) or not name or Path(name).name != name:
            return None
        file = self.path / name
        try:
            if file.is_symlink() or file.stat().st_size > self.left:
                return None
            found = file.read_bytes()
        except (OSError, ValueError):  # a name may hold what no file's does
            return None
        self.left -= len(found)
        return found

    def url(self, name: object) -> str:
        """Return an image as a data URL; empty if it cannot be shown."""
        kind = _TYPES.get(Path(str(name)).suffix.lower())
        found = self.read(name) if kind else None
        return f"data:{kind};base64,{base64.b64encode(found).decode()}" if found else ""


def read_gallery(run: Path) -> Gallery | None:
    """Return the pictures that a run has saved; None if it has none."""
    folder = _Folder(run / FOLDER)
    try:
        listed = folder.path / "pictures.json"
        if listed.stat().st_size > MOST_BYTES:
            return None
        told = json.loads(listed.read_bytes(), parse_constant=_no_number)
    except (OSError, ValueError, RecursionError):
        return None
    entries = told.get("pictures") if isinstance(told, dict) else None
    if not isinstance(entries, list):
        return None
    shown = [_picture(entry, folder) for entry in entries if isinstance(entry, dict)]
    of = ", ".join(str(told[k]) for k in ("checkpoint", "split") if told.get(k))
    return Gallery(of=of, pictures=tuple(shown)) if shown else None


def _no_number(_: str) -> None:
    """NaN and infinity are no JSON."""


def _picture(entry: Mapping[str, Any], folder: _Folder) -> ShownPicture:
    kind, name = str(entry.get("kind")), str(entry.get("name", ""))
    title = str(entry.get("title") or name or "picture")
    text = str(entry.get("text") or "")
    made: ShownPicture | None = None
    if kind == "figure" and (source := folder.url(entry.get("file"))):
        made = ShownPicture(name=name, kind=kind, title=title, text=text, source=source)
    elif kind == "html" and (page := folder.read(entry.get("file"))):
        html = page.decode(errors="replace")
        made = ShownPicture(name=name, kind=kind, title=title, text=text, html=html)
    elif kind == "images":
        right, wrong = (_photographs(entry.get(side), folder) for side in ("right", "wrong"))
        made = ShownPicture(name=name, kind=kind, title=title, text=text, right=right, wrong=wrong)
    elif kind == "points" and (scatter := _scatter(entry.get("points"))):
        said = text or _drawn_of(scatter, entry.get("of"))
        made = ShownPicture(name=name, kind=kind, title=title, text=said, scatter=scatter)
    elif kind == "rows" and (table := _rows(entry.get("rows"), title)):
        made = ShownPicture(name=name, kind=kind, title=title, text=text, table=table)
    elif kind == "note":
        made = ShownPicture(name=name, kind=kind, title=title, text=text)
    lost = (
        f"This picture cannot be shown: its entry in {FOLDER}/pictures.json or its file is damaged."
    )
    return made or ShownPicture(name=name, kind="note", title=title, text=lost)


def _photographs(entries: Any, folder: _Folder) -> tuple[Photograph, ...]:
    found = []
    for entry in entries if isinstance(entries, list) else []:
        source = folder.url(entry.get("file")) if isinstance(entry, dict) else ""
        if source:
            chance = entry.get("probability")
            found.append(
                Photograph(
                    source=source,
                    target=str(entry.get("target", "?")),
                    predicted=str(entry.get("predicted", "?")),
                    probability=percent(chance) if isinstance(chance, int | float) else "",
                )
            )
    return tuple(found)


def _scatter(points: Any) -> Scatter | None:
    """Return the points that are two finite numbers each, on the same scale both ways."""
    pairs = [
        (float(p[0]), float(p[1]))
        for p in (points if isinstance(points, list) else [])
        if isinstance(p, list) and len(p) == 2 and all(isinstance(v, int | float) for v in p)
    ]
    if not pairs:
        return None
    low = min(min(pair) for pair in pairs)
    high = max(max(pair) for pair in pairs)
    span = (high - low) or 1.0
    places = tuple(
        (round(100 * (a - low) / span, 2), round(100 - 100 * (p - low) / span, 2)) for a, p in pairs
    )
    return Scatter(points=places, low=number(low), high=number(high))


def _drawn_of(scatter: Scatter, of: object) -> str:
    drawn = len(scatter.points)
    more = isinstance(of, int) and of > drawn
    whole = f" of {of:,}" if more else ""
    return f"{drawn:,}{whole} samples; on the line the prediction is exact."


def _rows(rows: Any, title: str) -> Table | None:
    told = [row for row in (rows if isinstance(rows, list) else []) if isinstance(row, dict)]
    head = list(dict.fromkeys(str(key) for row in told for key in row))
    if not head:
        return None
    cells: Sequence[tuple[str, ...]] = [tuple(number(row.get(k)) for k in head) for row in told]
    return Table(title=title, columns=tuple(head), rows=tuple(cells))
