"""The losses since the host last looked: kept on the device, read back together."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from samestep.errors import UserError
from samestep.ranks.world import World

_LONGEST = 1024
KEPT = "Training stopped; earlier checkpoints are kept."
"""Of a run, for one that keeps none to leave out of the message."""
REMEDIES = "Try a smaller --lr, --warmup-steps, --clip-norm 1, or a wider --precision."


class Sums(NamedTuple):
    """What the mean loss of an epoch is made of."""

    loss: float = 0.0
    """This rank's part of the sum of the losses of all samples or terms."""
    terms: float = 0.0
    """Samples or terms of all ranks."""


class Window:
    """Losses of steps not read yet. Ranks read at the same steps, since reading is a collective."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._losses: list[Tensor] = []
        self._sizes: list[int] = []
        self._terms: list[Tensor] = []
        self._first_step = 0

    @property
    def full(self) -> bool:
        """Whether it is time to read, lest the window grow without end."""
        return len(self._sizes) >= _LONGEST

    def add(
        self, step: int, losses: Sequence[Tensor], size: int, terms: Sequence[Tensor] | None = None
    ) -> None:
        """Keep this rank's part of the mean losses of the steps from `step` on.

        They are means over `size` samples, or over the `terms` of each step.
        """
        if not self._sizes:
            self._first_step = step
        self._losses.extend(losses)
        self._sizes.extend([size] * len(losses))
        self._terms.extend(terms or ())

    def read(self, wanted: Sequence[int], lr: float, sums: Sums) -> tuple[list[float], Sums]:
        """Empty the window.

        Args:
            wanted: steps in the window, counted from 1.
            lr: the current learning rate, for the message.
            sums: of the losses and of what they are means over, before the window.

        Returns:
            The mean loss of each wanted step over its global batch, and the sums with the window's.

        Raises:
            UserError: a loss in the window is NaN or infinite, on any rank.
        """
        if not self._sizes:
            return [], sums
        # The one place where the host waits for the device.
        local = torch.stack(self._losses).cpu().to(torch.float64).tolist()
        first = self._first_step + 1
        sizes: Sequence[float] = self._sizes
        if self._terms:
            sizes = torch.stack(self._terms).cpu().to(torch.float64).tolist()
        loss_sum, terms = sums
        for loss, size in zip(local, sizes, strict=True):
            loss_sum += loss * size
            terms += size
        sums = Sums(loss_sum, terms)
        bad = next((first + i for i, loss in enumerate(local) if not math.isfinite(loss)), 0)
        self._losses, self._sizes, self._terms = [], [], []
        mine = [local[step - first] for step in wanted]
        *losses, num_bad = self._world.reduce(
            torch.tensor([*mine, float(bad > 0)], dtype=torch.float64)
        ).tolist()
        if num_bad:
            # The largest of the negatives is the first bad step of any rank.
            latest = torch.tensor(-bad if bad else -(2**62))
            step = -int(self._world.reduce(latest, "max"))
            raise UserError(
                f"The loss is NaN or infinite at step {step} (learning rate {lr:.3g}). {KEPT} "
                f"{REMEDIES}",
                on_all_ranks=True,
            )
        return losses, sums
