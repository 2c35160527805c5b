"""The recipe's metrics over a training epoch, of the outputs that its steps have computed anyway.

They are looked at many steps at a time: metrics of a small batch cost as much as those of many.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samestep.data.trees import tree_leaves
from samestep.ranks.world import World
from samestep.training.metrics import Objects, States, functions_of, values_of
from samestep.training.parts import sum_over_parts

_MOST_STEPS = 64
_MOST_BYTES = 16 << 20


class Seen(NamedTuple):
    """What a forward of the training gave."""

    outputs: Any
    """Detached."""
    targets: Any
    samples: int
    part: int = 0
    """The virtual rank."""


class EpochMetrics:
    """Metrics of what this rank has trained in the running epoch, of each of its parts by itself.

    Args:
        metrics: of the recipe.
        device: where the outputs are.
        parts: virtual ranks of this rank; by default what it trains is one part.
        by_step: whether an object takes in each step by itself, so that its bits do not depend on
            when the sums are brought up to date.
    """

    def __init__(
        self,
        metrics: Mapping[str, Any],
        device: torch.device,
        parts: range = range(1),
        *,
        by_step: bool = False,
    ) -> None:
        self._first = parts.start
        self._parts = [_PartMetrics(metrics, device, by_step=by_step) for _ in parts]

    def __bool__(self) -> bool:
        return bool(self._parts[0])

    def reset(self) -> None:
        """Begin a new epoch."""
        for part in self._parts:
            part.reset()

    def add(self, seen: Sequence[Seen]) -> None:
        """Keep outputs; look at those that have gathered once they are many.

        Raises:
            UserError: a metric fails.
        """
        alone = len(self._parts) == 1
        for one in seen:
            self._parts[0 if alone else one.part - self._first].add(one)

    def settle(self) -> None:
        """Bring the sums up to date; the host waits for the device."""
        for part in self._parts:
            part.settle()

    def means(self, world: World, expected: int) -> dict[str, float]:
        """Return each metric over the samples of all ranks, after `settle`; every rank calls it.

        None where some of the expected samples were not measured, as of an epoch that an earlier
        version began, or before the recipe had the metric.
        """
        if not self:
            return {}
        rows = torch.tensor([part.row() for part in self._parts], dtype=torch.float64)
        *totals, samples = sum_over_parts(rows, world).tolist()
        if samples != expected:
            return {}
        some = self._parts[0]
        of_names = zip(some.names, totals[len(some.functions) :], strict=True)
        late = {name for name, parts in of_names if parts}
        for part in self._parts:
            part.late = late
        found = dict(zip(some.functions, totals, strict=False))
        whole = {n: total / samples for n, total in found.items() if n not in late}
        states = [state for part in self._parts for state in part.objects.states()]
        return {**whole, **some.objects.values(world, late, states)}

    def state(self) -> list[dict[str, Any]]:
        """Return what a checkpoint keeps of each part, after `settle`."""
        return [part.state() for part in self._parts]

    def load(self, parts: Sequence[Sequence[dict[str, Any]]]) -> None:
        """Go on from what was measured: of each part here, what one or several others were."""
        for place, part in enumerate(self._parts):
            part.load(parts[place] if place < len(parts) else ())


class _PartMetrics:
    """Metrics of one part."""

    def __init__(self, metrics: Mapping[str, Any], device: torch.device, *, by_step: bool) -> None:
        self.functions = functions_of(metrics)
        # Apple's GPU has no float64.
        self._home = torch.device("cpu") if device.type == "mps" else device
        self.objects = Objects(metrics, device)
        self.names = list(metrics)
        self._most_steps = 1 if by_step and self.objects else _MOST_STEPS
        self.reset()

    def __bool__(self) -> bool:
        return bool(self.functions or self.objects)

    def reset(self) -> None:
        """Begin a new epoch."""
        self._seen: list[Seen] = []
        self._most = self._most_steps
        self._unread: list[Tensor] = []
        self._sums, self._samples = [0.0] * len(self.functions), 0
        self.late: set[str] = set()
        """Metrics that the recipe gained within the epoch: they have not seen all of it."""
        self.objects.reset()

    def add(self, one: Seen) -> None:
        """Keep outputs; look at those that have gathered once they are many."""
        self._samples += one.samples
        if len(self._seen) == self._most or (self._seen and not _alike(one, self._seen[0])):
            self._look()
        if not self._seen:
            leaves = [leaf for leaf in tree_leaves(one.outputs) if isinstance(leaf, Tensor)]
            each = max(1, sum(leaf.nbytes for leaf in leaves))
            self._most = max(1, min(self._most_steps, _MOST_BYTES // each))
        self._seen.append(one)

    def _look(self) -> None:
        """Measure what has gathered: batches of one form."""
        seen, self._seen = self._seen, []
        if not seen:
            return
        outputs, targets, samples, _part = seen[0]
        if len(seen) > 1:
            outputs = torch.cat([one.outputs for one in seen])
            targets = torch.cat([one.targets for one in seen])
        count = samples * len(seen)
        with torch.no_grad():
            self.objects.update(outputs, targets)
            values = [values_of(n, f, outputs, targets, count) for n, f in self.functions.items()]
            if values:
                # Of each step by itself, so that the sum does not depend on what was put together.
                rows = torch.stack([value.to(self._home).double() for value in values])
                self._unread.append(rows.view(len(values), len(seen), samples).sum(dim=2).T)

    def settle(self) -> None:
        """Bring the sums up to date; the host waits for the device."""
        self._look()
        if self._unread:
            for row in torch.cat(self._unread).tolist():
                self._sums = [total + value for total, value in zip(self._sums, row, strict=True)]
            self._unread = []

    def row(self) -> list[float]:
        """Return the sums, which metrics are late, and the samples."""
        return [*self._sums, *(float(name in self.late) for name in self.names), self._samples]

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of this rank, after `settle`."""
        sums = dict(zip(self.functions, self._sums, strict=True))
        return {
            "sums": self._without_late(sums),
            "states": [self._without_late(states) for states in self.objects.states()],
            "samples": self._samples,
        }

    def _without_late(self, found: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in found.items() if name not in self.late}

    def load(self, ranks: Sequence[dict[str, Any]]) -> None:
        """Go on from what some ranks have measured."""
        self.reset()
        if not ranks:
            return
        self._samples = sum(rank["samples"] for rank in ranks)
        self._sums = [sum(rank["sums"].get(n, 0.0) for rank in ranks) for n in self.functions]
        states: list[States] = [one for rank in ranks for one in rank["states"]]
        self.objects.load(states)
        for rank in ranks:
            if rank["samples"]:
                known = {*rank["sums"], *(name for one in rank["states"] for name in one)}
                self.late |= set(self.names) - known


def _alike(one: Seen, other: Seen) -> bool:
    """Whether two batches can be put together."""
    outputs, targets, samples, _part = one
    return (
        samples == other.samples
        and isinstance(outputs, Tensor)
        and isinstance(targets, Tensor)
        and isinstance(other.outputs, Tensor)
        and isinstance(other.targets, Tensor)
        and outputs.shape == other.outputs.shape
        and targets.shape == other.targets.shape
        and len(outputs) == len(targets) == samples
    )
