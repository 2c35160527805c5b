"""Where the seconds of training steps go: a lap timer that every run carries.

A lap ends where the next begins, so that the phases of an epoch add up to its training time. On
the CPU the laps are readings of the host's clock. On CUDA they are events in the device's queue,
read once they have passed, so that no step waits for the host.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from samestep.base.run.records import COMPUTE, PHASES, WHOLE

_READ_EVERY = 1024


class Phases:
    """Seconds of each phase of the running epoch on this rank, by the host's clock."""

    def __init__(self, *, whole: bool = False) -> None:
        self.whole = whole
        """Whether a step is one phase, its parts unknown."""
        self.earlier: dict[str, float] = {}
        """Seconds of the running epoch that an earlier attempt spent, as its checkpoint says."""
        self.observer: Callable[[str], None] | None = None
        """Called with the phase at the end of each lap: a trace marks its phases there."""
        self._seconds: defaultdict[str, float] = defaultdict(float)  # of all epochs
        self._cleared: dict[str, float] = {}
        self._last = time.perf_counter()

    def begin(self) -> None:
        """Count from here on."""
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Count what has passed since the last lap to a phase."""
        now = time.perf_counter()
        self._seconds[phase] += now - self._last
        self._last = now
        if self.observer is not None:
            self.observer(phase)

    def running(self) -> dict[str, float]:
        """Return the seconds of all epochs of this attempt in each phase that there was."""
        return dict(self._seconds)

    def seconds(self) -> dict[str, float]:
        """Return the seconds of this epoch that this attempt spent in each phase."""
        return self._named(self._since_cleared())

    def total(self) -> dict[str, float]:
        """Return the seconds of this epoch in each phase, earlier attempts' included."""
        earlier, here = self.earlier, self._since_cleared()
        return self._named(
            {p: here.get(p, 0.0) + earlier.get(p, 0.0) for p in here.keys() | earlier.keys()}
        )

    def attempt(self) -> dict[str, float]:
        """Return the seconds of all epochs of this attempt in each phase."""
        return self._named(self.running())

    def clear(self) -> None:
        """Begin another epoch."""
        self._cleared = self.running()
        self.earlier = {}

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Count nothing inside, such as compiling."""
        self.lap("other")
        running = self.running()
        yield
        self.running()
        self._seconds = defaultdict(float, running)
        self.begin()

    def _since_cleared(self) -> dict[str, float]:
        return {p: s - self._cleared.get(p, 0.0) for p, s in self.running().items()}

    def _named(self, seconds: dict[str, float]) -> dict[str, float]:
        if not self.whole:
            # An earlier attempt of this epoch may have compiled its steps.
            names = (*PHASES, "step") if seconds.get("step") else PHASES
            return {phase: seconds.get(phase, 0.0) for phase in names}
        # Steps that are left over run one by one; to the reader they are steps too.
        inside = sum(seconds.get(phase, 0.0) for phase in (*COMPUTE, "all_reduce"))
        return {phase: inside if phase == "step" else seconds.get(phase, 0.0) for phase in WHOLE}


class DevicePhases(Phases):
    """The same by events in the queue of a device: `make_event` returns one that keeps time."""

    def __init__(self, make_event: Any) -> None:
        super().__init__()
        self._make = make_event
        self._spare: list[Any] = []
        self._marks: list[tuple[str, Any]] = []

    def begin(self) -> None:
        """Count from here on."""
        self.lap("")

    def lap(self, phase: str) -> None:
        """Count what has passed on the device since the last lap to a phase."""
        event = self._spare.pop() if self._spare else self._make()
        event.record()
        self._marks.append((phase, event))
        if len(self._marks) >= _READ_EVERY and self._marks[_READ_EVERY // 2][1].query():
            self._read(_READ_EVERY // 2 + 1)
        if self.observer is not None:
            self.observer(phase)

    def running(self) -> dict[str, float]:
        """Return the seconds of all epochs in each phase; the host waits for the device."""
        if self._marks:
            self._marks[-1][1].synchronize()
            self._read(len(self._marks))
        return super().running()

    def _read(self, count: int) -> None:
        """Read the first marks, all of which have passed; the last of them begins the next lap."""
        read = self._marks[:count]
        for (_, before), (phase, after) in pairwise(read):
            if phase:
                self._seconds[phase] += before.elapsed_time(after) / 1000
        self._spare.extend(event for _, event in read[:-1])
        self._marks = self._marks[count - 1 :]


def make_phases(device: torch.device) -> Phases:
    """Return the lap timer of a device. Apple's GPU is not looked into: its steps are whole."""
    if device.type == "cuda":
        return DevicePhases(lambda: torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
    return Phases(whole=device.type != "cpu")


def compute_of(phases: dict[str, float]) -> float:
    """Return the seconds that a rank computed itself, without waiting for data or other ranks."""
    return sum(phases.get(phase, 0.0) for phase in COMPUTE)


def tell_end_of_autograd(loss: Tensor, tell: Callable[[], None]) -> None:
    """Call `tell` within loss.backward(), once all gradients are computed and sent off.

    The engine calls back in the order of requests: this one when backward begins, DDP's wait for
    all-reduces with the last gradient.
    """
    engine = Variable._execution_engine  # noqa: SLF001 - PyTorch's own DDP has no other way

    def ask(_gradient: Tensor) -> None:
        engine.queue_callback(tell)

    loss.register_hook(ask)  # type: ignore[no-untyped-call]
