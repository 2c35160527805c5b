"""What one rank keeps of one short training, in a file of its own."""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(kw_only=True)
class Trace:
    """The steps of one rank, each by its number, counted from 1."""

    losses: dict[int, float] = field(default_factory=dict)
    """Mean over the global batch; known on rank 0."""
    norms: dict[int, float] = field(default_factory=dict)
    """Of the gradient, before clipping."""
    gradients: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """Step → parameter → its norm and values, as `fingerprints.values_of` keeps them."""
    weights: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """After each step; under Lightning after the last one only."""
    bits: dict[int, dict[str, str]] = field(default_factory=dict)
    """With virtual ranks: step → gradient, parameter or buffer → a mark of all its bits."""
    samples: dict[int, list[str]] = field(default_factory=dict)
    """The samples of this rank, in their order."""
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    """Step → loss and metrics over all samples; 0 is before training."""
    epochs: dict[int, dict[str, float]] = field(default_factory=dict)
    """With virtual ranks: step that ends an epoch → loss and metrics over what was trained."""
    evaluated: list[str] = field(default_factory=list)
    """The samples that this rank evaluated before training."""
    begun: int = 0
    """The step that was begun last; 0 before the first."""
