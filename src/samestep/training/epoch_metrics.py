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
        self.reset()

    def __bool__(self) -> bool:
        return bool(self._functions or self._objects)

    def reset(self) -> None:
        """Begin a new epoch."""
        self._seen: list[Seen] = []
        self._bytes = 0
        self._unread: list[Tensor] = []
        self._sums, self._samples = [0.0] * len(self._functions), 0
        self._objects.reset()

    def add(self, seen: Sequence[Seen]) -> None:
        """Keep outputs; look at those that have gathered once they are many.

        Raises:
            UserError: a metric fails.
        """
        for one in seen:
            alike = not self._seen or _form(one) == _form(self._seen[0])
            if not alike or len(self._seen) == _MOST_STEPS or self._bytes >= _MOST_BYTES:
                self._look()
            self._seen.append(one)
            self._bytes += sum(t.nbytes for t in tree_leaves(one.outputs) if isinstance(t, Tensor))
            self._samples += one.samples

    def _look(self) -> None:
        """Measure what has gathered: batches of one form."""
        seen, self._seen, self._bytes = self._seen, [], 0
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
        version began.
        """
        if not self:
            return {}
        sums = torch.tensor([*self._sums, self._samples], dtype=torch.float64)
        *totals, samples = world.reduce(sums).tolist()
        if samples != expected:
            return {}
        found = {n: total / samples for n, total in zip(self._functions, totals, strict=True)}
        return {**found, **self._objects.values(world)}

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of this rank, after `settle`."""
        states = self._objects.states()
        return {"sums": dict(zip(self._functions, self._sums, strict=True)), "states": states} | {
            "samples": self._samples
        }

    def load(self, ranks: Sequence[dict[str, Any]]) -> None:
        """Go on from what some ranks have measured; a metric that is new to them begins here."""
        self.reset()
        if not ranks:
            return
        self._samples = sum(rank["samples"] for rank in ranks)
        self._sums = [sum(rank["sums"].get(n, 0.0) for rank in ranks) for n in self._functions]
        states: list[States] = [one for rank in ranks for one in rank["states"]]
        self._objects.load(states)


def _form(seen: Seen) -> Any:
    """Return what batches have to share to be put together; of others nothing is equal to it."""
    outputs, targets = seen.outputs, seen.targets
    if isinstance(outputs, Tensor) and isinstance(targets, Tensor):
        same = outputs.shape, targets.shape, outputs.dtype
        return same if len(outputs) == len(targets) == seen.samples else object()
    return object()
