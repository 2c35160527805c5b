"""A table as plain data, and its lines on a terminal; a page shows the same values as HTML.

`table` in `templates/parts.html.j2` is the renderer for HTML.
"""

import sys
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import NamedTuple

from samestep.base.words import wrapped

_LEAST_NAME = 16
_LEAST_FOLDED = 20
_ANSI = {"bold": "1", "dim": "2", "red": "1;31", "green": "32", "yellow": "33"}


class Styled(NamedTuple):
    """A cell's text in a colour of a terminal: bold, dim, red, green or yellow."""

    text: str
    style: str


Cell = str | Styled


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table; the first column names its rows."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    marked: frozenset[int] = frozenset()
    """Rows that stand out."""
    note: str = ""
    left: frozenset[str] = frozenset()
    """Columns aligned left in addition to the first; the others are aligned right."""
    gap: int = 2
    """Spaces between columns."""
    fold: bool = False
    """Whether the last column wraps within the width of the terminal."""
    cut: int | None = None
    """The column shortened on a terminal that is too narrow; the others stay whole."""
    drop: Sequence[str] = ()
    """Columns left out, in this order, on a terminal that is too narrow."""
    shorten_after: int = sys.maxsize
    """The number of columns that are dropped before the first column is shortened instead."""


def text_lines(table: Table, width: int | None = None, *, colour: bool = False) -> Iterator[str]:
    """Yield the lines of a table, its headings first, without its title and note.

    Without a width, as for a file or a pipe, nothing is left out; styles are shown with `colour`.
    """
    cells = [
        [cell if isinstance(cell, Styled) else Styled(cell, "") for cell in row]
        for row in (table.columns, *table.rows)
    ]
    widths = [max(columns_of(row[n].text) for row in cells) for n in range(len(table.columns))]
    shown = _fitting(table, widths, width)
    blocks = [shown]
    gives_way = table.fold or table.drop
    if width is not None and not gives_way and _total(table, widths, shown) > width:
        blocks = list(_blocks(table, widths, width))
    for number, block in enumerate(blocks):
        if number:
            yield ""
        for row in cells:
            yield from _row_lines(table, row, block, widths, colour=colour)


def _fitting(table: Table, widths: list[int], width: int | None) -> list[int]:
    """Return the columns that are shown, and limit the widths of those that give way."""
    shown = list(range(len(widths)))
    if width is None:
        return shown
    if table.fold:
        others = _total(table, widths, shown) - widths[-1]
        widths[-1] = max(_LEAST_FOLDED, min(widths[-1], width - others))
    if table.cut is not None:
        over = _total(table, widths, shown) - width
        widths[table.cut] = max(1, widths[table.cut] - max(0, over))
    for number, name in enumerate((*table.drop, None)):
        over = _total(table, widths, shown) - width
        if over <= 0 or not table.drop:
            break
        room = widths[0] - over
        if number >= table.shorten_after and (room >= _LEAST_NAME or name is None):
            widths[0] = max(room, 1)
            break
        if name in table.columns:
            shown.remove(table.columns.index(name))
    return shown


def _total(table: Table, widths: list[int], shown: list[int]) -> int:
    return sum(widths[n] for n in shown) + table.gap * (len(shown) - 1)


def _blocks(table: Table, widths: list[int], width: int) -> Iterator[list[int]]:
    """Yield the columns of blocks that fit below each other, each with the first column."""
    block = [0]
    for n in range(1, len(widths)):
        if len(block) > 1 and _total(table, widths, [*block, n]) > width:
            yield block
            block = [0]
        block.append(n)
    yield block


def _row_lines(
    table: Table, row: list[Styled], block: list[int], widths: list[int], *, colour: bool
) -> Iterator[str]:
    parts = []
    for n in block:
        folds = table.fold and n == block[-1]
        text, width = row[n].text, widths[n]
        lines = list(wrapped(text, "", width)) or [""] if folds else [_shortened(text, width)]
        if n == 0 or folds or table.columns[n] in table.left:
            parts.append([line + " " * (width - columns_of(line)) for line in lines])
        else:
            parts.append([" " * (width - columns_of(line)) + line for line in lines])
    for line in zip_longest(*parts):
        cells = [" " * widths[n] if c is None else c for n, c in zip(block, line, strict=True)]
        if colour:
            cells = [coloured(row[n]._replace(text=c)) for n, c in zip(block, cells, strict=True)]
        yield (" " * table.gap).join(cells).rstrip()


def coloured(cell: Styled) -> str:
    """Return a text in its colour, by the codes of a terminal."""
    style = _ANSI.get(cell.style)
    return f"\x1b[{style}m{cell.text}\x1b[0m" if style and cell.text.strip() else cell.text


def _shortened(text: str, width: int) -> str:
    """Return a text without its middle if it is too wide: what differs is often at its end."""
    if columns_of(text) <= width:
        return text
    head = tail = ""
    while text and columns_of(head + text[0]) <= (width - 1) // 2:
        head, text = head + text[0], text[1:]
    while text and columns_of(text[-1] + tail) <= width - 1 - columns_of(head):
        tail, text = text[-1] + tail, text[:-1]
    return f"{head}…{tail}"


@lru_cache(1024)
def columns_of(text: str) -> int:
    """Return the width of a text in columns of a terminal."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    return len(text) + wide - sum(map(bool, map(unicodedata.combining, text)))


def texts(value: object) -> list[str]:
    """Return a list in a record as strings; empty if the value is not a list."""
    return [str(text) for text in value] if isinstance(value, list) else []
