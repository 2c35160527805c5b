"""Rows of predictions in a file that other programs read: CSV, JSON lines, Parquet."""

import csv
import importlib.util
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from samestep.base.errors import UserError
from samestep.base.run.files import write_atomically


def check_table_file(path: Path) -> None:
    """Check that a table can be written there, before anything is computed for it.

    Raises:
        UserError: its ending is unknown, its folder is not there, or pyarrow is not installed.
    """
    if path.suffix not in (".csv", ".jsonl", ".parquet"):
        raise UserError(f"--out {path}: the name must end in .csv, .jsonl or .parquet.")
    if not path.parent.is_dir():
        raise UserError(f"--out {path}: there is no folder {path.parent}.")
    if path.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise UserError(f"--out {path} needs the package pyarrow: pip install pyarrow")


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write predictions, as `--json` has them, under a temporary name, then rename it.

    In CSV and Parquet the classes are columns: `class`, `probability`, `class_2`, …. In CSV a list
    or dict is JSON.

    Raises:
        UserError: the file cannot be written.
    """
    flat = [] if path.suffix == ".jsonl" else [*map(_flat, rows)]

    def write(file: BinaryIO) -> None:
        if path.suffix == ".jsonl":
            file.writelines(json.dumps(row).encode() + b"\n" for row in rows)
        elif path.suffix == ".csv":
            _write_csv(file, flat)
        else:
            import pyarrow as pa  # noqa: PLC0415 - an extra
            from pyarrow import parquet  # noqa: PLC0415

            names = _columns(flat)  # of rows that differ, each has all
            table = pa.Table.from_pylist([dict.fromkeys(names) | row for row in flat])
            parquet.write_table(table, file)

    write_atomically(path, write)


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with a column for each class and probability."""
    flat = {name: value for name, value in row.items() if name != "classes"}
    for place, one in enumerate(row.get("classes", ()), 1):
        end = f"_{place}" if place > 1 else ""
        flat |= {f"class{end}": one["class"], f"probability{end}": one["probability"]}
    return flat


def _columns(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    return [*dict.fromkeys(name for row in rows for name in row)]


def _write_csv(file: BinaryIO, rows: list[dict[str, Any]]) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    writer = csv.DictWriter(text, _columns(rows))
    writer.writeheader()
    for row in rows:
        plain = {k: json.dumps(v) if isinstance(v, list | dict) else v for k, v in row.items()}
        writer.writerow(plain)
    text.flush()
    text.detach()
