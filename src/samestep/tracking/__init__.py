"""Runs at Comet, MLflow, TensorBoard and Weights & Biases, or at a tracker of your own.

Each is fed from the run directory by a process of its own, which the training never waits for.
"""

from samestep.tracking.contract import Entry, Result, Scalar, Started, TrackedRun

__all__ = ["Entry", "Result", "Scalar", "Started", "TrackedRun"]
