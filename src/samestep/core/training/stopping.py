"""When to stop: signals that all ranks agree on, and early stopping by a validation metric."""

import math
import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from signal import Signals
from types import FrameType

import torch

from samestep.base.startup import leave_unheeded, stop_signals, unheeded_signal
from samestep.launch.ranks.world import World

# Ranks agree about once in this many seconds; a signal waits at most that long, or one step.
_AGREE_EVERY_S = 0.5


@dataclass
class ReceivedSignal:
    """The stop signal that this process got, if any."""

    signum: int = 0
    agent: int = 0
    """The process id of the torchrun that started this rank, or 0."""

    @property
    def now(self) -> int:
        """The signal, or SIGTERM once torchrun is gone: it told its ranks nothing if SIGKILLed."""
        if self.agent not in (0, os.getppid()):
            self.signum, self.agent = self.signum or signal.SIGTERM, 0
        return self.signum


Again = Callable[[], None]
"""What a second SIGINT does."""


def end_process() -> None:
    """End at once: Python's own teardown could wait for the other ranks."""
    os._exit(128 + signal.SIGINT)


@contextmanager
def catch_signals(again: Again = end_process) -> Iterator[ReceivedSignal]:
    """Turn the stop signals into a request; a second SIGINT ends at once.

    Only a process's main thread gets signals: elsewhere there is nothing to catch.
    """
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    received = ReceivedSignal(unheeded_signal(), os.getppid() if by_torchrun else 0)
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def remember(signum: int, _frame: FrameType | None) -> None:
        if signum == signal.SIGINT and received.signum == signal.SIGINT:
            again()
        if Signals(signum).name == "SIGHUP":
            # Writing to a closed terminal fails.
            with Path(os.devnull).open("w") as nowhere:
                for descriptor in (1, 2):
                    if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                        os.dup2(nowhere.fileno(), descriptor)
        received.signum = signum

    before = {number: signal.signal(number, remember) for number in stop_signals()}
    try:
        yield received
    except BaseException:
        if received.signum:
            leave_unheeded(received.signum)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class Agreed:
    """What all ranks do next, decided together."""

    signum: int = 0
    wished: bool = False
    """Whether rank 0 has its wish."""
    makes_room: bool = False
    """Whether the ranks part, and meet again with one that waits to join them."""


class Agreement:
    """Let all ranks act on what one of them knows: a signal it got, or a wish of rank 0.

    On one rank, it costs a comparison per step. Several ranks meet about twice a second, at a step
    agreed on the time before; the reduction runs on the CPU and never waits for the device.
    """

    def __init__(
        self,
        world: World,
        received: ReceivedSignal,
        wish: Callable[[], bool] | None = None,
        someone_waits: Callable[[], bool] | None = None,
    ) -> None:
        """`wish` and `someone_waits` are asked on rank 0; None where the answer is always no."""
        self._world, self._received, self._wish = world, received, wish
        self._someone_waits = someone_waits
        self._met_at = time.perf_counter()
        self._met_step = self._next_step = 0

    def start(self, step: int) -> None:
        """Meet first after this step."""
        self._met_step = self._next_step = step

    def after(self, step: int) -> Agreed:
        """Return what to do after a step; all ranks call it with the same steps."""
        if not (self._world.connected or self._someone_waits):
            signum = self._received.now
            if signum == 0 and self._wish is None:
                return NOTHING
            return Agreed(signum, self._wishes())
        if step < self._next_step:
            return NOTHING
        now = time.perf_counter()
        per_step = (now - self._met_at) / max(1, step - self._met_step)
        steps = max(1, min(10_000, int(_AGREE_EVERY_S / max(per_step, 1e-9))))
        mine = [self._received.now, 0, 0, 0]
        if self._world.is_main:  # whose wish and clock count
            mine[1:] = [int(self._wishes()), int(self._waits()), steps]
        signum, wished, waits, steps = self._world.reduce(torch.tensor(mine), "max").tolist()
        self._met_at, self._met_step, self._next_step = now, step, step + steps
        return Agreed(signum, bool(wished), bool(waits))

    @property
    def signum(self) -> int:
        """The signal that this rank got, or 0."""
        return self._received.now

    def on(self, signum: int) -> int:
        """Return the signal that any rank acts on, or 0; all ranks call it."""
        return int(self._world.reduce(torch.tensor(signum), "max"))

    def _waits(self) -> bool:
        return self._someone_waits is not None and self._someone_waits()

    def _wishes(self) -> bool:
        return self._wish is not None and self._wish()


NOTHING = Agreed()


@dataclass(frozen=True, kw_only=True)
class Watch:
    """The monitored metric so far: its best value, and how long ago that was."""

    metric: str
    mode: str
    """"min" or "max"."""
    best: float | None = None
    best_epoch: int = 0
    reference: float | None = None
    """The value that counts as the last improvement by more than the min delta."""
    evaluations_since: int = 0

    def better(self, value: float, than: float | None, by: float = 0.0) -> bool:
        """Whether a value beats another by more than a margin."""
        if than is None:
            return True
        return value < than - by if self.mode == "min" else value > than + by

    def after(self, value: float, epoch: int, min_delta: float) -> "Watch":
        """Return the watch after another evaluation; NaN and infinity are not improvements."""
        watch, finite = self, math.isfinite(value)
        if finite and self.better(value, self.best):
            watch = replace(watch, best=value, best_epoch=epoch)
        if finite and self.better(value, self.reference, min_delta):
            return replace(watch, reference=value, evaluations_since=0)
        return replace(watch, evaluations_since=watch.evaluations_since + 1)
