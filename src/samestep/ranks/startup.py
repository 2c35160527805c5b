"""Before torch is imported, which takes seconds: hold a scheduler's warning, postpone collections.

SIGUSR1 would end a process that has not asked for it, so the command line holds it until the
training listens.

Python's garbage collector would take a fifth of a start's processor time: torch's modules are
180,000 objects that stay, with Lightning's 430,000, and every full collection looks at all of them.
So collections wait until a rank joins the others; what exists by then is never looked at again.
"""

import contextlib
import gc
import os
import signal
import sys

PARENT = "SAMESTEP_PARENT"
"""Set, to the parent's process id, in the ranks that `samestep --nproc` starts."""
_IS_RANK = "SAMESTEP_RANK_PROCESS"

_held: list[int] = []
_usual = gc.get_threshold()
_DURING_START = (10_000, 1_000, 1_000)  # not never: a command that joins no others ends with these


def die_with_parent() -> None:
    """Let the kernel end this rank when the parent that started it is killed (Linux only).

    Otherwise killing the command would leave ranks that go on training unseen.
    """
    parent = os.environ.get(PARENT)
    if not parent or sys.platform != "linux" or _IS_RANK in os.environ:
        return  # what a rank starts is no rank
    import ctypes  # noqa: PLC0415 - other commands need it later, or not at all

    os.environ[_IS_RANK] = str(os.getpid())
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != int(parent):  # it died before it could be asked for
        os._exit(1)


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a training with a checkpoint.

    Schedulers send SIGUSR1 ahead of the time limit. SIGHUP, of a terminal that closes, is not
    among them where it is ignored, as under `nohup`.
    """
    names = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")
    found = [getattr(signal, name) for name in names if hasattr(signal, name)]
    return [s for s in found if s.name != "SIGHUP" or signal.getsignal(s) != signal.SIG_IGN]


def hold_warning() -> None:
    """Keep SIGUSR1 for the training, where there is such a signal."""
    if hasattr(signal, "SIGUSR1"):
        with contextlib.suppress(ValueError):  # not the main thread: nothing is ours to hold
            signal.signal(signal.SIGUSR1, lambda signum, _frame: _held.append(signum))


def leave_unheeded(signum: int) -> None:
    """Keep a signal that a training got and could no longer act on."""
    _held.append(signum)


def forget_signals() -> None:
    """Forget what came before: a process that trains again and again begins anew each time."""
    _held.clear()


def unheeded_signal() -> int:
    """Return the newest signal that came and that nothing has acted on, or 0."""
    return _held[-1] if _held else 0


def postpone_collections() -> None:
    """Collect little until `resume_collections`."""
    gc.set_threshold(*_DURING_START)


def resume_collections() -> None:
    """Collect as usual again, after `postpone_collections`; without it, do nothing."""
    if gc.get_threshold() == _DURING_START:
        gc.freeze()
        gc.set_threshold(*_usual)
