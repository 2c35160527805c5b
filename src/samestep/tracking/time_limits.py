"""Let no call into a tracker take for ever: this process ends itself, and says why."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator


class TimeLimits:
    """Bound calls in time; a call that takes longer ends the process."""

    def __init__(self, give_up: Callable[[str], None]) -> None:
        self._give_up = give_up

    @contextlib.contextmanager
    def within(self, seconds: float, what: str) -> Iterator[None]:
        """End the process unless the block is left within so many seconds."""
        timer = self.all_within(seconds, what)
        try:
            yield
        finally:
            timer.cancel()

    def all_within(self, seconds: float, what: str) -> threading.Timer:
        """End the process after so many seconds, whatever it does, unless the timer is stopped."""
        timer = threading.Timer(seconds, self._expire, [f"{what} took more than {seconds:.3g} s"])
        timer.daemon = True
        timer.start()
        return timer

    def _expire(self, why: str) -> None:
        self._give_up(why)
        end_descendants(os.getpid())
        os._exit(1)  # the call that hangs cannot be ended otherwise


def end_descendants(pid: int) -> None:
    """SIGKILL what a process has started, in whatever session: trackers have helpers of theirs."""
    import psutil  # noqa: PLC0415 - only when something has to be ended

    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
