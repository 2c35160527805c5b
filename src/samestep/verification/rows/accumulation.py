"""Accumulation: a rank that takes its share in two micro-steps trains the same."""

from dataclasses import replace

from samestep.verification.evidence import Cause, Check, Evidence, TableRow, training_check
from samestep.verification.rows.samples_apart import moved_buffers
from samestep.verification.short_trainings import MAIN, ShortTraining

MOVED = "buffer that every forward moves"
_TRAINING = ShortTraining(name="accumulated", halves=True, short=True)


def _answer(evidence: Evidence) -> Check:
    if not evidence.bits:
        return _by_buffers(
            evidence, training_check(evidence, _TRAINING.name, "2 micro-steps per step")
        )
    one = evidence.trace(0, _TRAINING.name)
    if one is None and not evidence.failures(training=_TRAINING.name):
        return Check("skipped", "a virtual rank has too few samples")
    # Batch normalisation and dropout see micro-steps: one process takes them, too.
    found = evidence.compare_starts(_TRAINING.name, reference=one)
    return training_check(evidence, _TRAINING.name, "2 micro-steps each", found)


def _by_buffers(evidence: Evidence, check: Check) -> Check:
    """Return the check with its cause, where every forward moves a buffer and all else agrees."""
    moved, trained = moved_buffers(evidence), evidence.compare_starts(MAIN).values()
    apart = any(found.largest > evidence.tolerance_of(MAIN) for found in trained)
    if check.passed or check.failure or apart or not moved:
        return check
    cause = Cause(
        MOVED,
        f"Every forward moves {', '.join(moved[:3])}, as spectral_norm does: with 2 micro-steps "
        "it is moved twice per step. Without micro-steps the ranks train the same.",
        "Train without --accumulate (a --micro-batch-size as large as a rank's share), or move it "
        "once per optimizer step.",
    )
    return replace(check, cause=cause)


ROW = TableRow(name="accumulation", answer=_answer, thorough=True, training=_TRAINING)
