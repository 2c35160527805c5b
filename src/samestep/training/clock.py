"""Where the training stands, and the seconds that its steps have taken."""

import time
from dataclasses import dataclass, field

from samestep.run.records import Record

_PROGRESS_EVERY_S = 0.2


@dataclass(kw_only=True)
class Position:
    """Where the training stands: saved in each checkpoint, and resuming goes on from it."""

    step: int = 0
    """Optimizer steps taken."""
    epoch: int = 0
    """Epochs finished, their evaluation included."""
    step_in_epoch: int = 0
    stream_ended: bool = False
    """Whether all of the running epoch's stream is trained."""
    samples: int = 0
    """Samples trained."""
    samples_before: int = 0
    """The value of `samples` when the running epoch began."""
    seconds: float = 0.0
    """Seconds spent in training steps, over all attempts."""
    epoch_started_s: float = 0.0
    """The value of `seconds` when the running epoch began."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds of the running epoch in each phase of its steps, on rank 0."""
    evaluation_due: bool = False
    """Whether an evaluation that fell due within the epoch was stopped, and is to be done first."""


class Clock:
    """Count the seconds of training steps, without the evaluations and checkpoints between."""

    def __init__(self, position: Position) -> None:
        self._before, self._since = position.seconds, time.perf_counter()
        self._marked = (position.samples, position.seconds)
        self._shown = 0.0

    def seconds(self) -> float:
        """Return the seconds so far."""
        return self._before + time.perf_counter() - self._since

    def resume(self, position: Position) -> None:
        """Go on after a pause that began when the position was brought up to date."""
        self._before, self._since = position.seconds, time.perf_counter()

    def leave_out(self, seconds: float) -> None:
        """Do not count these seconds: they were spent in compiling."""
        self._since += seconds

    def rate(self, position: Position) -> Record:
        """Return the fields `seconds` and `samples_per_s`, the latter since the last mark."""
        samples, seconds = self._marked
        now = self.seconds()
        return {
            "seconds": now,
            "samples_per_s": (position.samples - samples) / max(now - seconds, 1e-9),
        }

    def mark(self, position: Position) -> None:
        """Measure the next rate from here."""
        self._marked = (position.samples, self.seconds())

    def shows(self) -> bool:
        """Whether a progress bar should move again."""
        now = time.perf_counter()
        if now - self._shown < _PROGRESS_EVERY_S:
            return False
        self._shown = now
        return True
