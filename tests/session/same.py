"""What two runs of a loop of one's own are compared by."""

import math
from pathlib import Path
from typing import Any

import torch

from samestep import read_records
from tests.session.scripts import weights

_OF_THE_CLOCK = {"seconds", "samples_per_s", "train_seconds", "time"}


def account(run: Path) -> list[dict[str, Any]]:
    """Return what a run says of its training, without what the clock says."""
    return [
        {k: v for k, v in flat.items() if k not in _OF_THE_CLOCK}
        for r in read_records(run)
        if r["event"] in ("step", "epoch", "evaluation", "metrics")
        for flat in [{**r, "metrics": 0, **r.get("metrics", {})}]
    ]


def assert_same(run: Path, reference: Path, tolerance: float = 1e-9) -> None:
    """Compare all records and the last checkpoints of two runs; tolerance 0 means every bit."""
    ours, theirs = account(run), account(reference)
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert value == other[name] or (
                isinstance(value, float) and math.isclose(value, other[name], abs_tol=tolerance)
            ), (one, other)
    assert_close(weights(run), weights(reference), tolerance)


def assert_close(one: Any, other: Any, tolerance: float) -> None:
    """Compare two trees of tensors and plain values."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_close(one[key], other[key], tolerance)
    elif isinstance(one, list | tuple):
        for mine, its in zip(one, other, strict=True):
            assert_close(mine, its, tolerance)
    elif isinstance(one, torch.Tensor):
        assert float((one - other).abs().max()) <= tolerance
    else:
        assert one == other
