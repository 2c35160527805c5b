"""A file of the run directory that is touched while steps are taken.

`events.jsonl` has a record every so many steps; whether a job of Slurm moves has to show sooner.
"""

import contextlib
import time
from pathlib import Path

FILE = ".stepped"
_EVERY_S = 2.0


class Heartbeat:
    """Touch the file of a run, not more often than every few seconds."""

    def __init__(self, run: Path) -> None:
        self._path = run / FILE
        self._next = 0.0

    def beat(self) -> None:
        """Say that a step was taken."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _EVERY_S
            with contextlib.suppress(OSError):  # a full disk ends no training
                self._path.touch()
