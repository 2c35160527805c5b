"""What is found out of a recipe in one process, before ranks are compared."""

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from samestep.run.files import write_text
from samestep.settings import Precision
from samestep.verification.randomness import Kind
from samestep.verification.sizes import Cut


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Whether a batch's loss is what its parts' losses say, were it their mean over samples."""

    full: float
    """Relative difference for the full batch."""
    uneven: float
    """Relative difference for the incomplete one."""
    adds_up: bool
    """Whether it is the sum of its parts' losses instead."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All that one process can tell."""

    num_samples: int
    """Training samples of the recipe."""
    cut: Cut
    evaluates: str
    """The split that is evaluated."""
    exact: Precision = "fp64"
    """The precision that shows what is no rounding."""
    inexact: str = ""
    """Why this is not float64."""
    lightning: bool = False
    """Whether Lightning is there and can take these settings."""
    problem: str = ""
    """Why the model could not be looked at, if it could not."""
    batchnorm: tuple[str, ...] = ()
    """Names of the batch normalisations."""
    draws: dict[str, str] = field(default_factory=dict)
    """Random operation of torch in forward or loss → the line it stands in, if it is the user's."""
    generators: dict[str, str] = field(default_factory=dict)
    """Generator outside of torch that forward or loss draws from → the line, if known."""
    own_generators: tuple[str, ...] = ()
    """Lines that draw from a `torch.Generator` of their own, which goes on from step to step."""
    unused: tuple[str, ...] = ()
    """Parameters without a gradient."""
    loss: Loss | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """Metric → how much a sample's value depends on the others of its batch."""
    remembers: tuple[str, float] | None = None
    """The first module whose output differs in a second, equal forward, and by how much."""
    mixes: tuple[str, float] | None = None
    """The first module in which a sample's output depends on the others, and by how much."""
    unsteady: str = ""
    """What of the data differs when the same sample is read twice: dataset, transform, augment."""
    batchwise: bool = False
    """Whether it differs only when it is read in another batch."""
    failed_sizes: dict[int, str] = field(default_factory=dict)
    """Samples in a batch → how the model fails with so many."""

    @property
    def present(self) -> frozenset[Kind]:
        """What differs with the number of ranks by itself."""
        kinds: set[Kind] = set()
        if self.batchnorm:
            kinds.add("batchnorm")
        if self.draws:
            kinds.add("dropout")
        if self.generators:
            kinds.add("state")
        return frozenset(kinds)


def write_facts(path: Path, facts: Facts) -> None:
    """Leave the facts for the starts that follow."""
    write_text(path, msgspec.json.encode(facts).decode())


def read_facts(path: Path) -> Facts | None:
    """Return what was found, or None where nothing was."""
    return msgspec.json.decode(path.read_bytes(), type=Facts) if path.is_file() else None
