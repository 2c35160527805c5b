"""What the parent and the ranks leave for each other: files in one temporary folder."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from samestep.run.files import write_atomically
from samestep.settings import Precision
from samestep.training.side_effects import Kind
from samestep.verification.training_size import TrainingSize

T = TypeVar("T")
Found = dict[str, msgspec.Raw]
"""Row of the table → what its experiment found, encoded; absent where it found nothing."""


def encoded(value: Any) -> msgspec.Raw:
    """Return a finding as `Found` keeps it: in msgpack, since JSON has no NaN and no infinity."""
    return msgspec.Raw(msgspec.msgpack.encode(value))


def decoded(found: Mapping[str, msgspec.Raw], row: str, kind: type[T]) -> T | None:
    """Return what a row's experiment found, if it found anything."""
    return msgspec.msgpack.decode(found[row], type=kind) if row in found else None


@dataclass(frozen=True, kw_only=True)
class Start:
    """Ranks that are started once and run several short trainings."""

    place: int
    """Its number, counted from 0. All but the first resume the checkpoint of the one before."""
    world_size: int
    closing: bool = False
    """Whether this start only resumes, and evaluates a checkpoint on one device."""


@dataclass(frozen=True, kw_only=True)
class StartInstructions:
    """What the ranks of one start are to do."""

    start: Start
    sizes: tuple[int, ...]
    batch: int | None
    """The global batch, if the user named one."""
    lightning: bool
    """Whether Lightning is installed and to be compared too."""
    quick: bool = False
    """Whether what `--quick` leaves out is not trained."""


@dataclass(frozen=True, kw_only=True)
class RecipeFacts:
    """What the first process found out about the recipe, before ranks are compared."""

    num_samples: int
    """Training samples of the recipe."""
    size: TrainingSize
    evaluates: str
    """The split that is evaluated."""
    exact: Precision = "fp64"
    """The most exact precision that the model can compute in."""
    inexact: str = ""
    """Why this is not float64."""
    virtual_ranks: int | None = None
    """With them every training has to be equal to the last bit, and nothing is held still."""
    lightning: bool = False
    """Whether Lightning is there and can take these settings."""
    present: frozenset[Kind] = frozenset()
    """What the recipe has of those things that differ on other numbers of ranks by themselves."""
    found: Found = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """How a short training failed on a rank."""

    training: str
    step: int
    """The step that was being taken, counted from 1; 0 before the first."""
    message: str
    mistake: bool = False
    """Whether it is a `UserError`, whose message the user sees as it is."""
    lost_peer: bool = False
    """Whether another rank's failure caused it."""


@dataclass(kw_only=True)
class RankReport:
    """What a rank tells about itself, beside its traces."""

    num_samples: int = 0
    """Training samples that its data has."""
    found: Found = field(default_factory=dict)
    failures: list[RankFailure] = field(default_factory=list)


def folder_of(folder: Path, place: int, rank: int) -> Path:
    """Return where a rank of a start keeps its files."""
    return folder / f"start-{place}" / f"rank-{rank}"


def run_of(folder: Path, place: int, training: str) -> Path:
    """Return the run directory of a short training."""
    return folder / f"start-{place}" / "runs" / training.replace(" ", "-")


def write_left(path: Path, value: Any) -> None:
    """Leave instructions, facts or a report for another process."""
    write_atomically(path, lambda file: file.write(encoded(value)))


def read_left(path: Path, kind: type[T]) -> T | None:
    """Return what another process left, or None if it left nothing."""
    return msgspec.msgpack.decode(path.read_bytes(), type=kind) if path.is_file() else None


def read_reports(folder: Path, start: Start) -> list[RankReport]:
    """Return the reports of all ranks; an empty one for a rank that was killed before it wrote."""
    ranks = [folder_of(folder, start.place, rank) for rank in range(start.world_size)]
    return [read_left(rank / "report", RankReport) or RankReport() for rank in ranks]
