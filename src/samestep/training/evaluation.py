"""Evaluate a model: every sample counts once, sums and counts are reduced, then divided once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from samestep.data.trees import tree_leaves
from samestep.errors import UserError
from samestep.ranks.world import World
from samestep.settings import Precision
from samestep.training.confusion import Confusion
from samestep.training.precision import autocast


def evaluation_batch(batch_size: int) -> int:
    """Return the batch of an evaluation: without gradients four times as much fits."""
    return max(256, 4 * batch_size)


class Evaluable(Protocol):
    """Data of which every rank can read its share once."""

    def evaluation(self, batch_size: int) -> Iterator[tuple[Any, Any]]:
        """Yield this rank's share of all samples once, as batches of inputs and targets."""


def evaluate(
    model: nn.Module,
    source: Evaluable,
    loss: Callable[[Any, Any], Tensor],
    metrics: Mapping[str, Callable[[Any, Any], Tensor]],
    *,
    world: World,
    batch_size: int,
    precision: Precision,
    classes: Sequence[str] = (),
) -> dict[str, Any]:
    """Return loss and metrics as means over all samples of all ranks, and their number.

    Args:
        model: the unwrapped model; ranks may hold unequal shares, so no collective runs in it.
        source: the data; each rank evaluates its own share of it.
        loss: (outputs, targets) → mean over the batch.
        metrics: name → (outputs, targets) → (batch,).
        world: this rank among the others.
        batch_size: samples per rank and forward pass.
        precision: of the forward pass.
        classes: names of the classes, if what is taken for which is to be counted too.

    Returns:
        `loss`, each metric by its name, and `samples`; with classes also `per_class` and
        `confusion`, as `Confusion.result` has them.
    """
    totals = Totals(loss, metrics, world, classes)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for inputs, targets in source.evaluation(batch_size):
            with autocast(precision, world.device):
                totals.add(model(inputs), targets)
    model.train(was_training)
    return totals.means()


class Totals:
    """Sums of the losses and metrics of samples, and their number."""

    def __init__(
        self,
        loss: Callable[[Any, Any], Tensor],
        metrics: Mapping[str, Callable[[Any, Any], Tensor]],
        world: World,
        classes: Sequence[str] = (),
    ) -> None:
        self._loss, self._metrics, self._world = loss, metrics, world
        # float64, so that sums over a large set do not depend on how it was shared out. Apple's
        # GPU has none; there the sums are moved to the CPU batch by batch.
        home = torch.device("cpu") if world.device.type == "mps" else world.device
        self._sums = torch.zeros(len(metrics) + 2, dtype=torch.float64, device=home)
        self._confusion = Confusion(classes, home) if classes else None

    def add(self, outputs: Any, targets: Any) -> None:
        """Add a batch.

        Raises:
            UserError: a metric returned something else than one value a sample.
        """
        sums, home = self._sums, self._sums.device
        batch_loss = self._loss(outputs, targets)
        if self._confusion is not None:
            self._confusion.add(outputs, targets)
        values = [metric(outputs, targets) for metric in self._metrics.values()]
        for name, value in zip(self._metrics, values, strict=True):
            if value.dim() != 1:
                raise UserError(
                    f"The recipe's metric {name!r} returned shape {tuple(value.shape)}; it "
                    "must be one value a sample, (batch,): sums and counts are reduced here.",
                    on_all_ranks=True,
                )
        count = len(values[0]) if values else len(_first(targets))
        sums[0] += batch_loss.to(home).to(torch.float64) * count
        for place, value in enumerate(values, start=1):
            sums[place] += value.to(home).sum(dtype=torch.float64)
        sums[-1] += count

    def means(self) -> dict[str, Any]:
        """Return what `evaluate` does, over all ranks; every rank calls it."""
        *totals, samples = self._world.reduce(self._sums).tolist()
        names = ["loss", *self._metrics]
        means = {name: total / samples for name, total in zip(names, totals, strict=True)}
        counted = self._confusion.result(self._world) if self._confusion is not None else {}
        return {**means, "samples": int(samples), **counted}


def _first(tree: Any) -> Tensor:
    leaf: Tensor = tree_leaves(tree)[0]
    return leaf
