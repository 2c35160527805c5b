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

_MOST_STEPS = 64
_MOST_BYTES = 16 << 20


class Seen(NamedTuple):
    """What a forward of the training gave."""

    outputs: Any
    """Detached."""
    targets: Any
    samples: int


class EpochMetrics:
    """Metrics of what this rank has trained in the running epoch."""

    def __init__(self, metrics: Mapping[str, Any], device: torch.device) -> None:
        self._functions = functions_of(metrics)
        # Apple's GPU has no float64.
        self._home = torch.device("cpu") if device.type == "mps" else device
        self._objects = Objects(metrics, device)
        self._names = list(metrics)
        self.reset()

    def __bool__(self) -> bool:
        return bool(self._functions or self._objects)

    def reset(self) -> None:
        """Begin a new epoch."""
        self._seen: list[Seen] = []
        self._most = _MOST_STEPS
        self._unread: list[Tensor] = []
        self._sums, self._samples = [0.0] * len(self._functions), 0
        self._late: set[str] = set()
        """Metrics that the recipe gained within the epoch: they have not seen all of it."""
        self._objects.reset()

    def add(self, seen: Sequence[Seen]) -> None:
        """Keep outputs; look at those that have gathered once they are many.

        Raises:
            UserError: a metric fails.
        """
        for one in seen:
            self._samples += one.samples
            if len(self._seen) == self._most or (self._seen and not _alike(one, self._seen[0])):
                self._look()
            if not self._seen:
                leaves = [leaf for leaf in tree_leaves(one.outputs) if isinstance(leaf, Tensor)]
                each = max(1, sum(leaf.nbytes for leaf in leaves))
                self._most = max(1, min(_MOST_STEPS, _MOST_BYTES // each))
            self._seen.append(one)

    def _look(self) -> None:
        """Measure what has gathered: batches of one form."""
        seen, self._seen = self._seen, []
        if not seen:
            return
        outputs, targets, samples = seen[0]
        if len(seen) > 1:
            outputs = torch.cat([one.outputs for one in seen])
            targets = torch.cat([one.targets for one in seen])
        count = samples * len(seen)
        with torch.no_grad():
            self._objects.update(outputs, targets)
            values = [values_of(n, f, outputs, targets, count) for n, f in self._functions.items()]
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

    def means(self, world: World, expected: int) -> dict[str, float]:
        """Return each metric over the samples of all ranks, after `settle`; every rank calls it.

        None where some of the expected samples were not measured, as of an epoch that an earlier
        version began, or before the recipe had the metric.
        """
        if not self:
            return {}
        late = [float(name in self._late) for name in self._names]
        sums = torch.tensor([*self._sums, *late, self._samples], dtype=torch.float64)
        *totals, samples = world.reduce(sums).tolist()
        if samples != expected:
            return {}
        of_ranks = zip(self._names, totals[len(self._sums) :], strict=True)
        self._late = {name for name, ranks in of_ranks if ranks}
        found = dict(zip(self._functions, totals, strict=False))
        whole = {n: total / samples for n, total in found.items() if n not in self._late}
        return {**whole, **self._objects.values(world, self._late)}

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of this rank, after `settle`."""
        sums = dict(zip(self._functions, self._sums, strict=True))
        return {
            "sums": self._without_late(sums),
            "states": [self._without_late(states) for states in self._objects.states()],
            "samples": self._samples,
        }

    def _without_late(self, found: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in found.items() if name not in self._late}

    def load(self, ranks: Sequence[dict[str, Any]]) -> None:
        """Go on from what some ranks have measured."""
        self.reset()
        if not ranks:
            return
        self._samples = sum(rank["samples"] for rank in ranks)
        self._sums = [sum(rank["sums"].get(n, 0.0) for rank in ranks) for n in self._functions]
        states: list[States] = [one for rank in ranks for one in rank["states"]]
        self._objects.load(states)
        for rank in ranks:
            if rank["samples"]:
                known = {*rank["sums"], *(name for one in rank["states"] for name in one)}
                self._late |= set(self._names) - known


def _alike(one: Seen, other: Seen) -> bool:
    """Whether two batches can be put together."""
    outputs, targets, samples = one
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
