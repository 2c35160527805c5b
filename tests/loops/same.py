"""What two runs of a loop of one's own are compared by."""

from pathlib import Path
from typing import Any

from tests import tiny
from tests.loops.scripts import weights
from tests.tiny import assert_close


def account(run: Path) -> list[dict[str, Any]]:
    return tiny.account(run, "metrics")


def assert_same(run: Path, reference: Path, tolerance: float = 1e-9) -> None:
    """Compare all records and the last checkpoints of two runs; tolerance 0 means every bit."""
    ours, theirs = account(run), account(reference)
    assert ours
    tiny.assert_close_records(ours, theirs, tolerance)
    assert_close(weights(run), weights(reference), tolerance)
