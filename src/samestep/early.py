"""Hold a scheduler's warning that comes before the training can listen.

Importing PyTorch takes seconds, and SIGUSR1 would end a process that has not asked for it.
"""

import contextlib
import signal
from types import FrameType

_held: list[int] = []


def hold_warning() -> None:
    """Keep SIGUSR1 for the training, where there is such a signal."""
    if hasattr(signal, "SIGUSR1"):
        with contextlib.suppress(ValueError):  # not the main thread: nothing is ours to hold
            signal.signal(signal.SIGUSR1, _hold)


def held_warning() -> int:
    """Return the signal that came meanwhile, or 0."""
    return _held[-1] if _held else 0


def _hold(signum: int, _frame: FrameType | None) -> None:
    _held.append(signum)
