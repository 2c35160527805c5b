"""What doctor printed with --json, as tests ask for it."""

import json
from typing import Any

Row = dict[str, str]


def rows_of(printed: str) -> dict[str, Row]:
    """Return the rows, by name, of the one table that was printed."""
    return rows_in(json.loads(printed))


def rows_in(table: dict[str, Any]) -> dict[str, Row]:
    """Return the rows of a table by name."""
    return {row["name"]: row for row in table["checks"]}


def reds(rows: dict[str, Row]) -> set[str]:
    """Return the names of the red rows; each says what to do."""
    red = {name for name, row in rows.items() if row["status"] == "red"}
    assert all(rows[name]["advice"] for name in red)
    return red
