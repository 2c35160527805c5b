"""A screen that shows nothing, for whoever wants the numbers alone."""

from pathlib import Path
from typing import Any, Self

from samestep.run.records import Record


class Nothing:
    """Take records, and show none."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, record: Record) -> None:
        """Show nothing of a record."""

    def result(self, path: Path, result: dict[str, Any]) -> None:
        """Show nothing of how the run ended."""
