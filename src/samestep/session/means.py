"""Means of what a script logs, over the samples of all ranks: of single steps and of an epoch."""

import math
from typing import Any

import torch
from torch import Tensor

from samestep.errors import UserError
from samestep.ranks.world import World
from samestep.run.records import TAKEN_NAMES

Sums = dict[str, tuple[float, float]]
"""Name → the sum of its values times their weights, and the sum of the weights."""
_MOST_WAITING = 1024


class Means:
    """Weighted means by name. Values stay on the device until somebody reads them.

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
        """Take the values of the running step, each a mean over `weight` samples or terms."""
        for name, value in values.items():
            pair = _number(name, value), _number("terms", weight)
            self._waiting.append((self._now, name, *pair))
        if len(self._waiting) >= _MOST_WAITING:
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
        numbers = iter([next(read) if isinstance(one, Tensor) else one for one in flat])
        for step, name, *_ in self._waiting:
            value, weight = next(numbers), next(numbers)
            for sums in (self.sums, self._step) if step == self._now else (self.sums,):
                # A mean over nothing is NaN, and counts for nothing.
                _add(sums, name, value * weight if weight else 0.0, weight)
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


def _add(sums: Sums, name: str, total: float, weight: float) -> None:
    before = sums.get(name, (0.0, 0.0))
    sums[name] = before[0] + total, before[1] + weight


def added_up(ranks: list[Sums]) -> Sums:
    """Return the sums of all ranks; names in the order of the first rank."""
    found: Sums = {}
    for sums in ranks:
        for name, (total, weight) in sums.items():
            _add(found, name, total, weight)
    return found


def _means(ranks: list[Sums]) -> dict[str, float]:
    sums = added_up(ranks).items()
    return {name: total / weight if weight else math.nan for name, (total, weight) in sums}


def check_names(values: dict[str, Any]) -> None:
    """Refuse a value that is named like another field of the records."""
    for name in values:
        if name != "loss" and name in TAKEN_NAMES:
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
