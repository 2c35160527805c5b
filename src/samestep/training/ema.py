"""An exponential moving average of the weights, which is evaluated and saved in their place."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn


class Average:
    """The average of a model's trained weights (Polyak & Juditsky 1992, exponentially weighted).

    After each step: average = decay · average + (1 - decay) · weights. It begins as the weights.
    Buffers, such as BatchNorm's statistics, are the model's own.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._decay = decay
        self._named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._weights = [p.detach() for p in self._named.values()]
        self._averages = [p.clone() for p in self._weights]

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights after a step."""
        torch._foreach_lerp_(self._averages, self._weights, 1.0 - self._decay)

    def state(self) -> dict[str, Tensor]:
        """Return the average of each weight by its name."""
        return dict(zip(self._named, self._averages, strict=True))

    @torch.no_grad()
    def load(self, saved: dict[str, Tensor] | None) -> None:
        """Take the averages of a checkpoint; where it has none, begin at the weights."""
        source = self._named if saved is None else saved
        for name, average in self.state().items():
            average.copy_(source[name])

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the model the averages within this context, and then its own weights again."""
        kept = [weight.clone() for weight in self._weights]
        with torch.no_grad():
            torch._foreach_copy_(self._weights, self._averages)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._weights, kept)
