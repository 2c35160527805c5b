"""Before torch is imported, which takes seconds: hold a scheduler's warning, postpone collections.

SIGUSR1 would end a process without a handler, so the command line holds it until the training
listens. Python's garbage collector would take a fifth of a start's processor time, as every full
collection looks at torch's 180,000 objects: collections wait until a rank joins the others, and
what exists by then is never looked at again.
"""

import contextlib
import errno
import gc
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

PARENT = "SAMESTEP_PARENT"
"""Set, to the parent's process id, in the ranks that `samestep --nproc` starts."""

JOB_RUN = "SAMESTEP_RUN_DIR"
"""Set, to the run directory, in the ranks of a Slurm job that samestep wrote."""
HOSTS = "SAMESTEP_HOSTS"
"""Set by a job's script, where ranks outlive each other: the names of its nodes."""
TIED_TO = "SAMESTEP_TIED_TO"
"""Set, to the parent's process id, in a training that a sweep starts; it is not a rank of a run."""

_IS_RANK = "SAMESTEP_RANK_PROCESS"
_held: list[int] = []
_usual = gc.get_threshold()
_DURING_START = (10_000, 1_000, 1_000)  # not never: a command that joins no others ends with these


def die_with_parent() -> None:
    """Let the kernel end this process when its parent is killed (Linux only)."""
    of_sweep = os.environ.pop(TIED_TO, None)
    parent = of_sweep or os.environ.get(PARENT)
    if not parent or sys.platform != "linux" or _IS_RANK in os.environ:
        return  # what a rank starts is not a rank
    import ctypes  # noqa: PLC0415 - other commands need it later, or not at all

    if not of_sweep:
        os.environ[_IS_RANK] = str(os.getpid())
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != int(parent):  # it died before it could be asked for
        os._exit(1)


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a training with a checkpoint.

    Schedulers send SIGUSR1 ahead of the time limit. SIGHUP, of a closing terminal, is left out
    where it is ignored, as under `nohup`.
    """
    names = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")
    signals = [getattr(signal, name) for name in names if hasattr(signal, name)]
    return [s for s in signals if s.name != "SIGHUP" or signal.getsignal(s) != signal.SIG_IGN]


class _Forking(threading.local):
    mask: set[signal.Signals] | None = None
    """This thread's before a fork."""
    serves = False
    """Whether what this thread forks serves the ranks while they stop."""


_forking = _Forking()

# Ours and the elastic agent's: each only notes a stop, or raises where an agent waits for it.
_OURS = ("samestep.", "torch.distributed.elastic.")


def _our_signals() -> list[signal.Signals]:
    handled = {number: signal.getsignal(number) for number in stop_signals()}
    names = {n: str(getattr(by, "__module__", "")) for n, by in handled.items() if by != _interrupt}
    return [number for number, name in names.items() if name.startswith(_OURS)]


_MAY_HANG = sys.platform == "linux" and sys.version_info < (3, 11, 10)
"""Such a Python may hang in a child forked while a thread enters it (python/cpython#112275)."""
_SETTLE_S = 0.2


def _threads_run() -> bool:
    """Whether a PyTorch thread is running.

    After a collective, a Gloo thread enters Python to drop the tensors, then sleeps.
    """
    for stat in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            name, _, state = stat.read_text().partition(") ")
            if "(pt_" in name and state.startswith("R"):
                return True
    return False


def _before_fork() -> None:
    until = time.monotonic() + _SETTLE_S
    while _MAY_HANG and _threads_run() and time.monotonic() < until:
        time.sleep(0.001)
    if signals := _our_signals():  # one that comes too early would be lost, and its sender wait
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # type: ignore[assignment]


def _after_fork() -> None:
    mask, _forking.mask = _forking.mask, None
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _after_fork_in_child() -> None:
    """Let SIGTERM end this child, as `multiprocessing` expects; leave other stops to the parent.

    A child that inherits a handler that only notes the signal lives on, and `Pool` waits for it.
    """
    for number in _our_signals() if _forking.mask is not None else ():
        ends = number == signal.SIGTERM and not _forking.serves
        # Unlike SIG_IGN a function is not inherited by a program that the child starts.
        signal.signal(number, signal.SIG_DFL if ends else lambda *_: None)
    _after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
    )


@contextlib.contextmanager
def forking_servants() -> Iterator[None]:
    """Let what this thread forks keep working while the ranks stop, as loader workers do."""
    _forking.serves = True
    try:
        yield
    finally:
        _forking.serves = False


def end_leftovers(parent: int, session: int | None = None) -> None:
    """SIGKILL all ranks of a parent and what they have started, until nothing is left.

    They inherit its variable, even if their own parent is gone. Processes in the parent's session
    were started next to the ranks, not by them.
    """
    import psutil  # noqa: PLC0415 - a rank that starts does not need it

    session = os.getsid(parent) if session is None else session
    until = time.monotonic() + 5.0
    while time.monotonic() < until:
        signalled = False
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                theirs = process.environ().get(PARENT) == str(parent)
                if theirs and os.getsid(process.pid) != session and process.pid != os.getpid():
                    process.kill()
                    signalled = True
        if not signalled:
            return
        time.sleep(0.02)


class _Nowhere(io.TextIOBase):
    def write(self, text: str, /) -> int:
        return len(text)


class _ClosedOutput(io.TextIOBase):
    """Standard output that was closed before the command began."""

    def write(self, _text: str, /) -> int:
        raise BrokenPipeError(errno.EPIPE, "it is closed")


def accept_output() -> None:
    """Let standard output and error be of any encoding, or closed.

    No file that is opened later gets the number of a closed one, to which libraries still write.
    Characters that the encoding does not have are replaced.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it takes the lowest number that is free
    sys.stdout = sys.stdout or _ClosedOutput()
    sys.stderr = sys.stderr or _Nowhere()
    if isinstance(sys.stdout, io.TextIOWrapper):
        with contextlib.suppress(OSError):  # its descriptor leads elsewhere than when it was opened
            sys.stdout.reconfigure(errors="replace")


def drop_output() -> None:
    """Drop what is printed from now on, and what waits in a buffer: nothing takes it any more."""
    with Path(os.devnull).open("w") as nowhere:
        try:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        except (OSError, ValueError):  # it has no descriptor, or no open one
            sys.stdout = _Nowhere()


def hold_warning() -> None:
    """Hold SIGUSR1 for the training, where there is such a signal."""
    if hasattr(signal, "SIGUSR1"):
        with contextlib.suppress(ValueError):  # not the main thread: it holds no signals
            signal.signal(signal.SIGUSR1, lambda signum, _frame: _held.append(signum))


def _interrupt(signum: int, frame: FrameType | None) -> None:
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    if getattr(spec, "_initializing", False):
        os._exit(128 + signum)
    signal.default_int_handler(signum, frame)


def hear_interrupts() -> None:
    """Let Ctrl-C end this process also while it imports torch.

    There, C++ code may drop a KeyboardInterrupt, or abort by it.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it may be ignored
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGINT, _interrupt)


def leave_unheeded(signum: int) -> None:
    """Keep a signal that a training could no longer act on."""
    _held.append(signum)


def forget_signals() -> None:
    """Forget earlier signals: each training of a process begins anew."""
    _held.clear()


def unheeded_signal() -> int:
    """Return the newest signal that nothing has acted on, or 0."""
    return _held[-1] if _held else 0


def postpone_collections() -> None:
    """Collect little until `resume_collections`."""
    gc.set_threshold(*_DURING_START)


def resume_collections() -> None:
    """Collect as usual again, after `postpone_collections`; without it, do nothing."""
    if gc.get_threshold() == _DURING_START:
        gc.freeze()
        gc.set_threshold(*_usual)


THREADS_WISHED = "SAMESTEP_OMP_NUM_THREADS"
"""Set, to the user's OMP_NUM_THREADS, in ranks that samestep starts: it gives them one of 1."""


def threads_wished(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of threads that the user set in OMP_NUM_THREADS, if any.

    torchrun sets it to 1 where it starts several ranks: that 1 is not the user's.
    """
    value = environment.get(THREADS_WISHED, environment.get("OMP_NUM_THREADS", ""))
    first = value.split(",")[0].strip()
    by_torchrun = THREADS_WISHED not in environment and "TORCHELASTIC_RUN_ID" in environment
    if not first.isdecimal() or int(first) < 1 or (by_torchrun and value == "1"):
        return None
    return int(first)
