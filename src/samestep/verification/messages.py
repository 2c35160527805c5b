"""What parent and ranks leave for each other: files in one temporary folder."""

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from samestep.verification.situations import Start


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How a situation failed on a rank."""

    situation: str
    step: int
    """The step that was being taken, counted from 1; 0 before the first."""
    message: str
    mistake: bool
    """Whether it is one that the user is told of as it is."""
    lost_peer: bool
    """Whether it is the effect of another rank's."""


@dataclass(kw_only=True)
class Told:
    """What a rank tells of itself beside its traces."""

    num_samples: int = 0
    """Training samples that its data has."""
    marks: list[str] = field(default_factory=list)
    """Of the first training samples as they are stored."""
    printed: dict[str, str] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)
    across: dict[str, float] = field(default_factory=dict)
    """Metric → how much its value changes when other ranks measure other samples beside it."""
    loaded: dict[str, float] = field(default_factory=dict)
    """Evaluation of the resumed checkpoint on one device."""
    failures: list[Failure] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Order:
    """What the parent asks of a start, left in a file."""

    start: Start
    sizes: tuple[int, ...]
    batch: int | None
    """The global batch, if the user named one."""
    lightning: bool
    """Whether Lightning is installed and to be compared too."""


def folder_of(folder: Path, place: int, rank: int) -> Path:
    """Return where a rank of a start keeps its files."""
    return folder / f"start-{place}" / f"rank-{rank}"


def run_of(folder: Path, place: int, situation: str) -> Path:
    """Return the run directory of a situation."""
    return folder / f"start-{place}" / "runs" / situation.replace(": ", "-").replace(" ", "-")


def read_told(folder: Path, place: int, rank: int) -> Told:
    """Return what a rank told; nothing if it came to no end."""
    path = folder_of(folder, place, rank) / "told.json"
    return msgspec.json.decode(path.read_bytes(), type=Told) if path.is_file() else Told()
