"""The `step` records of a run, in columns: a dict of each of a million takes a gigabyte."""

import math
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Any, overload

from samestep.base.run.records import Record, RecordFile, as_uninterrupted, up_to_step

_MISSING, _NULL, _INT, _FLOAT, _OTHER = range(5)
_KINDS = {type(None): _NULL, int: _INT, float: _FLOAT}
_EXACT = 2**53
"""Beyond it, not every integer is a float."""
_ABSENT = object()
_AT_ONCE = 4096


class _Column:
    """The values of one field: numbers as floats, all else by its row."""

    def __init__(self) -> None:
        self.kinds, self.numbers = bytearray(), array("d")
        self.others: dict[int, Any] = {}

    def extend(self, values: list[Any]) -> None:
        types = {*map(type, values)}
        if types == {float}:
            self.kinds += bytes([_FLOAT]) * len(values)
            self.numbers.extend(values)
        elif types == {int} and min(values) >= -_EXACT and max(values) <= _EXACT:
            self.kinds += bytes([_INT]) * len(values)
            self.numbers.extend(values)
        else:
            for value in values:
                kind = _MISSING if value is _ABSENT else _KINDS.get(type(value), _OTHER)
                if kind == _INT and abs(value) > _EXACT:
                    kind = _OTHER
                if kind == _OTHER:
                    self.others[len(self.kinds)] = value
                self.numbers.append(value if kind in (_INT, _FLOAT) else math.nan)
                self.kinds.append(kind)

    def values(self, part: slice, rows: range) -> list[Any]:
        """Return the values of some rows, given as a slice and as its range."""
        kinds, numbers = self.kinds[part], self.numbers[part]
        if kinds.count(_FLOAT) == len(kinds):
            return numbers.tolist()
        if kinds.count(_INT) == len(kinds):
            return [*map(int, numbers)]
        values: list[Any] = []
        for row, kind, number in zip(rows, kinds, numbers, strict=True):
            if kind in (_INT, _FLOAT):
                values.append(int(number) if kind == _INT else number)
            else:
                values.append(None if kind == _NULL else self.others.get(row, _ABSENT))
        return values


class StepRows(Sequence[Record]):
    """`step` records; their dicts are made anew when they are asked for."""

    def __init__(self) -> None:
        self._columns: dict[str, _Column] = {}
        self._num = 0

    def column(self, name: str) -> _Column:
        """Return a column, which grows with the rows."""
        return self._columns.setdefault(name, _Column())

    def extend(self, records: Sequence[Record]) -> None:
        """Add records."""
        for name in dict.fromkeys(chain(self._columns, *records)):
            if name != "event":
                column = self.column(name)
                column.extend([_ABSENT] * (self._num - len(column.kinds)))  # in none before
                column.extend([record.get(name, _ABSENT) for record in records])
        self._num += len(records)

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[Record]:
        for first in range(0, self._num, _AT_ONCE):
            yield from self[first : first + _AT_ONCE]

    @overload
    def __getitem__(self, row: int) -> Record: ...
    @overload
    def __getitem__(self, row: slice) -> list[Record]: ...
    def __getitem__(self, row: int | slice) -> Record | list[Record]:
        if isinstance(row, int):
            at = range(self._num)[row]
            return self[at : at + 1][0]
        names = ("event", *self._columns)
        rows = range(self._num)[row]
        values = [["step"] * len(rows), *(c.values(row, rows) for c in self._columns.values())]
        records = (zip(names, row_values, strict=True) for row_values in zip(*values, strict=True))
        if any(_ABSENT in column for column in values):
            return [{name: v for name, v in pairs if v is not _ABSENT} for pairs in records]
        return [dict(pairs) for pairs in records]

    @property
    def names(self) -> set[str]:
        """The fields that any of them has."""
        return {*self._columns}

    def numbers(self, name: str) -> Sequence[float | int | None] | None:
        """Return a field of all, NaN where it has none; None if it has anything but numbers."""
        column = self._columns.get(name)
        if column is None:
            return array("d", [math.nan]) * self._num
        if {*map(type, column.others.values())} - {int}:
            return None
        if not column.others:
            return column.numbers
        return [column.others.get(row, number) for row, number in enumerate(column.numbers)]


class CompactRecords:
    """The records of a run as one uninterrupted run would have written them, without their file."""

    def __init__(self, lines: RecordFile, path: Path) -> None:
        """Read all.

        Raises:
            OSError: the file cannot be read.
            UserError: the run is of a newer samestep.
        """
        self._written = StepRows()
        self._kept = as_uninterrupted(self._read(lines), path, self._until)

    def _read(self, lines: RecordFile) -> Iterator[Record]:
        """Yield the records; of `step` records only which rows they are."""
        for chunk in lines.read():
            for is_step, group in groupby((r for _, r in chunk), lambda r: r["event"] == "step"):
                if not is_step:
                    yield from group
                    continue
                before = len(self._written)
                self._written.extend([*group])
                yield {"event": "step", "rows": range(before, len(self._written))}

    def _until(self, record: Record, step: int) -> Record | None:
        if (rows := _rows(record)) is None:
            return up_to_step(record, step)
        steps = self._written.column("step").numbers
        end = next((row for row in rows if steps[row] > step), rows.stop)
        return {**record, "rows": range(rows.start, end)} if end > rows.start else None

    def __iter__(self) -> Iterator[Record]:
        for record in self._kept:
            if (rows := _rows(record)) is None:
                yield record
            else:
                yield from self._written[rows.start : rows.stop]

    def in_short(self) -> list[Record]:
        """Return the records; of `step` records that follow each other, only the last."""
        ends = ((record, _rows(record)) for record in self._kept)
        return [record if rows is None else self._written[rows[-1]] for record, rows in ends]

    def steps(self) -> StepRows:
        """Return the `step` records."""
        spans = [rows for record in self._kept if (rows := _rows(record)) is not None]
        if sum(map(len, spans)) == len(self._written):
            return self._written
        step_rows = StepRows()
        for rows in spans:
            step_rows.extend(self._written[rows.start : rows.stop])
        return step_rows


def _rows(record: Record) -> range | None:
    rows = record.get("rows")
    return rows if isinstance(rows, range) else None  # which JSON has none of
