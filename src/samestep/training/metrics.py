"""Metrics over many batches: sums of values per sample, and objects with a state of their own.

An object is a metric of torchmetrics, or one that has what those have: `update`, `compute`,
`reset`, and a state that is gathered from all ranks.
"""

import contextlib
import copy
import warnings
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from samestep.data.trees import describe
from samestep.errors import UserError, blame, defined_at
from samestep.ranks.world import World
from samestep.recipe import is_cross_entropy

States = dict[str, dict[str, Any]]
"""Name of a metric object → name of a state → a tensor, or a list of tensors."""


def is_object(metric: Any) -> bool:
    """Whether a metric gathers a state, rather than returning one value a sample."""
    return all(callable(getattr(metric, name, None)) for name in ("update", "compute", "reset"))


def functions_of(metrics: Mapping[str, Any]) -> dict[str, Callable[[Any, Any], Any]]:
    """Return the metrics that return one value a sample."""
    return {name: metric for name, metric in metrics.items() if not is_object(metric)}


def check_object(name: str, metric: Any) -> None:
    """Check that ranks can put together what a metric object gathers.

    Raises:
        UserError: it has no state that says how it is reduced.
    """
    if not getattr(metric, "_reductions", None):
        raise UserError(
            f"The recipe's metric {name!r} is a {type(metric).__name__} without a state that ranks "
            "could put together. Use a torchmetrics.Metric whose add_state() names its states, or "
            "a function (outputs, targets) → one value a sample."
        )


def values_of(name: str, metric: Callable[..., Any], outputs: Any, targets: Any, count: int) -> Any:
    """Return a metric's values of a batch: (samples,).

    Raises:
        UserError: it fails, or returns something else.
    """
    value = told(f"metric {name!r}", metric, outputs, targets)
    if not isinstance(value, Tensor) or value.shape != (count,):
        raise UserError(
            f"The recipe's metric {name!r}{defined_at(metric)} returned {describe(value)} "
            f"for {count} samples; it must be one value a sample, ({count},): sums and counts are "
            "reduced here. A metric that needs all predictions at once is a torchmetrics.Metric."
        )
    return value


def told(what: str, function: Callable[..., Any], outputs: Any, targets: Any) -> Any:
    """Return what a recipe's function makes of outputs and targets.

    Raises:
        UserError: it fails.
    """
    try:
        return function(outputs, targets)
    except Exception as error:
        trees = f"outputs {describe(outputs)} and targets {describe(targets)}"
        remedy = remedy_of(error, outputs, targets, function)
        blame(f"The recipe's {what} failed with {trees}", error, function, remedy=remedy)


def remedy_of(error: Exception, outputs: Any, targets: Any, function: object) -> str:
    """Return what to do where a library's loss or metric fails for a common reason; else nothing.

    A function of the user's own takes what they like, and their line says what it made of it.
    """
    remedy = ""
    if defined_at(function) or isinstance(targets, dict):
        return remedy
    if not isinstance(outputs, Tensor):
        found = type(outputs).__name__
        hint = "end forward with `return`" if outputs is None else "return it alone"
        remedy = f"The model returns a {found} where a tensor is needed: {hint}."
    elif not isinstance(targets, Tensor):
        pass
    elif is_cross_entropy(function):
        if isinstance(error, IndexError):
            num = outputs.shape[1:2].numel()
            remedy = f"The model has {num} outputs, so classes are 0 to {num - 1}."
        elif targets.shape[1:] == (1,):
            remedy = "Classes are one number a sample, (batch,): targets.squeeze(1)."
        elif targets.dtype != torch.int64 and targets.shape != outputs.shape:
            remedy = (
                "Classes are whole numbers: targets.long(). For targets that are measured, take "
                "another loss, such as nn.functional.mse_loss."
            )
    elif targets.shape != outputs.shape:
        remedy = (
            "Their shapes differ: give both the shape that it takes, or give the recipe a function "
            "(outputs, targets) that does."
        )
    return remedy


class Objects:
    """This rank's copies of a recipe's metric objects, empty at first."""

    def __init__(self, metrics: Mapping[str, Any], device: torch.device) -> None:
        self._metrics = {n: copy.deepcopy(m) for n, m in metrics.items() if is_object(m)}
        for name, metric in self._metrics.items():
            check_object(name, metric)
            metric.to(device)
        self.reset()

    def __bool__(self) -> bool:
        return bool(self._metrics)

    def reset(self) -> None:
        """Begin anew."""
        self._earlier: list[States] = []
        """What other ranks had gathered, before the training went on on another number of them:
        a state that is no sum cannot go on from the states of several."""
        for metric in self._metrics.values():
            metric.reset()

    def update(self, outputs: Any, targets: Any) -> None:
        """Take in a batch.

        Raises:
            UserError: a metric fails.
        """
        for name, metric in self._metrics.items():
            told(f"metric {name!r}", metric.update, outputs, targets)

    def states(self) -> list[States]:
        """Return what this rank's have gathered, on the CPU; nothing of those without samples."""
        own = {
            name: {state: _on(getattr(metric, state), "cpu") for state in metric._reductions}  # noqa: SLF001
            for name, metric in self._metrics.items()
            if metric._update_count  # noqa: SLF001
        }
        return [*self._earlier, own] if own else self._earlier

    def load(self, found: Sequence[States]) -> None:
        """Take what `states` gave, on one rank or on several, in place of what is here."""
        self.reset()
        if len(found) == 1:
            self._put_together(found)
        else:
            self._earlier = list(found)

    def _put_together(self, found: Sequence[States]) -> None:
        for name, metric in self._metrics.items():
            _merge(metric, [states[name] for states in found if name in states])

    def next_part(self) -> None:
        """Keep what was gathered apart from what comes: another part of the data begins."""
        self._earlier = self.states()
        for metric in self._metrics.values():
            metric.reset()

    def values(
        self, world: World, without: Container[str] = (), states: Sequence[States] | None = None
    ) -> dict[str, float]:
        """Return each metric over all samples of all ranks, `without` some; every rank calls it.

        Args:
            world: this rank among the others.
            without: metrics to leave out.
            states: what this rank has gathered, where it is more than is here.

        Raises:
            UserError: one does not compute a single number.
        """
        if not self._metrics:
            return {}
        ranks = world.gather(self.states() if states is None else states)
        whole = Objects(self._metrics, torch.device("cpu"))
        whole._put_together([states for rank in ranks for states in rank])
        wanted = {n: metric for n, metric in whole._metrics.items() if n not in without}
        return {name: _number(name, metric) for name, metric in wanted.items()}

    def check(self) -> None:
        """Check that each computes a single number, where it can compute of what it has.

        Raises:
            UserError: one computes something else.
        """
        for name, metric in self._metrics.items():
            value: Any = 0.0
            with contextlib.suppress(Exception):  # of a few samples, perhaps all of one class
                value = _computed(metric)
            _check_number(name, value)


def _merge(metric: Any, ranks: Iterable[dict[str, Any]]) -> None:
    """Put the states of ranks together as torchmetrics does: stack or flatten, then reduce.

    Of a single one there is nothing to reduce.
    """
    metric.reset()
    found = list(ranks)
    for name, reduction in metric._reductions.items() if found else ():  # noqa: SLF001
        values = [states[name] for states in found]
        if isinstance(values[0], list):
            whole: Any = [tensor for value in values for tensor in value]
        elif len(values) == 1:
            (whole,) = values
        else:
            stacked = torch.stack(values)
            whole = stacked if reduction is None else reduction(stacked)
        setattr(metric, name, _on(whole, metric.device))
    metric._update_count = len(found)  # noqa: SLF001 - it has been updated, on other ranks


def _number(name: str, metric: Any) -> float:
    try:
        value = _computed(metric)
    except Exception as error:
        blame(f"The recipe's metric {name!r} failed to compute", error)
    return _check_number(name, value)


def _computed(metric: Any) -> Any:
    # It has the states of all ranks already: torchmetrics would add up equal ones once a rank. It
    # reads `sync_on_compute` when a metric is made, and this from then on.
    metric._to_sync = False  # noqa: SLF001
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of metrics that no sample of a small set reaches
        return metric.compute()


def _check_number(name: str, value: Any) -> float:
    if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
        return float(value)
    raise UserError(
        f"The recipe's metric {name!r} computed {describe(value)}; it must be a single number. "
        'Average over classes (average="macro"), or name one metric for each.'
    )


def _on(value: Any, device: Any) -> Any:
    if isinstance(value, list):
        return [tensor.detach().to(device) for tensor in value]
    return value.detach().to(device)
