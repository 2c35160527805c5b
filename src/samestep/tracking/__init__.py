"""Runs at Comet, MLflow, TensorBoard and Weights & Biases, or at a tracker of your own.

Each is fed from the run directory by a process of its own, which the training never waits for.
"""

from samestep.tracking.contract import (
    Picture,
    Scalar,
    Started,
    TrackedRecord,
    TrackedResult,
    TrackedRun,
)

Entry, Result = TrackedRecord, TrackedResult  # the names that trackers written earlier import

__all__ = ["Picture", "Scalar", "Started", "TrackedRecord", "TrackedResult", "TrackedRun"]
