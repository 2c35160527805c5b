"""A finished profile: what was measured, the verdict, what was tried, and where the traces are."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.profiling.bottleneck import Bottleneck
from samestep.profiling.measured import MeasuredSteps
from samestep.profiling.tracing import write_whole


@dataclass(frozen=True, kw_only=True)
class Row:
    """One value that was tried."""

    value: int
    seconds: float
    """A step, in the fastest of the rounds: whatever else runs only adds to it."""
    samples_per_s: float
    ratio: float
    """How many times as many samples per second as the first value."""
    low: float
    high: float
    """The smallest and the largest of the rounds' ratios to the best value before it."""
    data: float
    """Seconds per step that it waited for data."""
    helps: bool
    """Whether it was faster than the best value before it, beyond noise."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Values of one setting that were tried, in turns."""

    setting: str
    rows: tuple[Row, ...]
    best: int
    """The value to use."""
    skipped: tuple[int, ...] = ()
    """Values that were not tried any more, since larger ones had stopped to help."""
    why: str = ""
    """Why it ended where it did."""
    sure: bool = True
    """Whether the rounds agree well enough to rely on it."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """All that a profile found."""

    name: str
    path: Path
    measured: MeasuredSteps
    verdict: Bottleneck
    sweeps: tuple[Sweep, ...] = ()
    traces: tuple[str, ...] = ()
    precision: str = ""

    def as_table(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        table = dataclasses.asdict(self)
        table["path"] = str(self.path)
        table["verdict"]["share"] = self.verdict.share
        table["measured"]["gpu_idle"] = self.measured.gpu_idle
        return table


def save_profile(profile: Profile) -> None:
    """Write profile.json beside the traces.

    Raises:
        UserError: it could not be written.
    """
    text = json.dumps(profile.as_table(), indent=2) + "\n"
    write_whole(profile.path / "profile.json", text.encode())
