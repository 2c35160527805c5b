"""What a script logs: means over the samples of all ranks, of single steps and of an epoch."""

import math
from typing import Any

import torch
from torch import Tensor

from samestep.errors import UserError
from samestep.ranks.world import World
from samestep.recipe_checks import RESERVED_NAMES

Sums = dict[str, tuple[float, float]]
"""Name → the sum of its values by weight, and the sum of the weights."""
_LONGEST = 1024
"""Values that wait on the device at most."""


class Means:
    """Values by name and step. They stay on the device until somebody reads them.

    Ranks read together. What only some ranks have logged is the mean over those.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._waiting: list[tuple[int, str, float | Tensor, float | Tensor]] = []
        self._now = 0
        self._step: Sums = {}
        self.sums: Sums = {}
        """Of this rank, since the last `clear`."""

    def add(self, values: dict[str, Any], weight: float | Tensor) -> None:
        """Take the values of the running step, each a mean over `weight` samples or terms.

        Raises:
            UserError: one is not a single number.
        """
        for name, value in values.items():
            pair = _number(name, value), _number("terms", weight)
            self._waiting.append((self._now, name, *pair))
        if len(self._waiting) >= _LONGEST:
            self._settle()

    def next_step(self) -> None:
        """Begin a new step: what is added from here on belongs to it."""
        self._now += 1
        self._step = {}

    def _settle(self) -> None:
        """Add up what waits, in its order; the one place where the host waits for the device."""
        flat = [one for _, _, *pair in self._waiting for one in pair]
        there = [one for one in flat if isinstance(one, Tensor)]
        read = iter(torch.stack(there).cpu().to(torch.float64).tolist() if there else ())
        numbers = [next(read) if isinstance(one, Tensor) else one for one in flat]
        for place, (step, name, *_) in enumerate(self._waiting):
            value, weight = numbers[2 * place], numbers[2 * place + 1]
            for sums in (self.sums, self._step) if step == self._now else (self.sums,):
                total, weights = sums.get(name, (0.0, 0.0))
                # A mean over nothing is NaN, and counts for nothing.
                sums[name] = total + (value * weight if weight else 0.0), weights + weight
        self._waiting = []

    def of_step(self) -> dict[str, float]:
        """Return the means of the running step over all ranks; all ranks call it."""
        self._settle()
        return _means(self._world.gather(self._step))

    def read(self) -> dict[str, float]:
        """Return the means since the last `clear` over all ranks; all ranks call it."""
        self._settle()
        return _means(self._world.gather(self.sums))

    def clear(self) -> None:
        """Forget everything."""
        self._waiting, self._step, self.sums = [], {}, {}


def check_names(values: dict[str, Any]) -> None:
    """Check that no value is called what records call something else.

    Raises:
        UserError: one is.
    """
    for name in values:
        if name != "loss" and name in RESERVED_NAMES:
            raise UserError(
                f"run.log({name}=…): records have a field {name!r} already. Give it another name, "
                f"such as 'own_{name}'."
            )


def _number(name: str, value: Any) -> float | Tensor:
    """Return a value that later changes in place cannot reach."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise UserError(
                f"run.log({name}=…) was given a tensor of shape {tuple(value.shape)}; log single "
                "numbers: means over the samples of the batch."
            )
        if value.device.type == "cpu":
            return float(value.detach())
        return value.detach().reshape(()).to(torch.float32, copy=True)
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"run.log({name}=…) was given a {type(value).__name__}; log single numbers."
        ) from error


def _means(ranks: list[Sums]) -> dict[str, float]:
    """Return the means over all ranks, the same on each: names in the order of the first rank."""
    found: Sums = {}
    for sums in ranks:
        for name, (total, weights) in sums.items():
            before = found.get(name, (0.0, 0.0))
            found[name] = before[0] + total, before[1] + weights
    return {
        name: total / weights if weights else math.nan for name, (total, weights) in found.items()
    }
