"""Before torch is imported, which takes seconds: hold a scheduler's warning, postpone collections.

SIGUSR1 would end a process that has not asked for it, so the command line holds it until the
training listens.

Python's garbage collector would take a fifth of a start's processor time: torch's modules are
180,000 objects that stay, with Lightning's 430,000, and every full collection looks at all of them.
So collections wait until a rank joins the others; what exists by then is never looked at again.
"""

import contextlib
import gc
import signal

_held: list[int] = []
_usual = gc.get_threshold()
_DURING_START = (10_000, 1_000, 1_000)  # not never: a command that joins no others ends with these


def hold_warning() -> None:
    """Keep SIGUSR1 for the training, where there is such a signal."""
    if hasattr(signal, "SIGUSR1"):
        with contextlib.suppress(ValueError):  # not the main thread: nothing is ours to hold
            signal.signal(signal.SIGUSR1, lambda signum, _frame: _held.append(signum))


def held_warning() -> int:
    """Return the signal that came meanwhile, or 0."""
    return _held[-1] if _held else 0


def postpone_collections() -> None:
    """Collect little until `resume_collections`."""
    gc.set_threshold(*_DURING_START)


def resume_collections() -> None:
    """Collect as usual again, after `postpone_collections`; without it, do nothing."""
    if gc.get_threshold() == _DURING_START:
        gc.freeze()
        gc.set_threshold(*_usual)
