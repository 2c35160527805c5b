"""Metrics of torchmetrics in a LightningModule, over all samples of an evaluation and all ranks.

Each batch leaves their states, and the ranks put these together at the end. Then the metrics that
were logged are computed, and the module's hook at the end of an evaluation is called.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from samestep.base.errors import UserError, defined_at, listed
from samestep.bridges.lightning.logged import metrics_of, noted, plain_name
from samestep.core.learner.gathered import ComputedOnce
from samestep.core.learner.side_effects import model_prints
from samestep.core.training.metrics import put_into, states_of

AT_END = ("on_validation_epoch_end", "on_test_epoch_end")


def take_states(module: nn.Module, logged: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return places by name of the metrics that are logged, and states by place; reset them all.

    A logged value that a metric has just returned counts as the metric itself.
    """
    if not (metrics := metrics_of(module)):
        return {}, {}
    for part in module.modules():
        if isinstance(part, sys.modules["torchmetrics"].MetricCollection):
            part.values(copy_state=False)  # of those that share a state, only one was updated
    places = {id(one): place for place, one in module.named_modules()}
    returned = [(v, m) for m in metrics for v in (m._forward_cache, m._computed)]  # noqa: SLF001
    of = {value.data_ptr(): m for value, m in returned if isinstance(value, Tensor)}
    named = {n: of.get(v.data_ptr()) if isinstance(v, Tensor) else v for n, v in logged.items()}
    states = {places[id(m)]: states_of(m) for m in metrics if m._update_count}  # noqa: SLF001
    for metric in metrics:
        metric.reset()
    return {n: places[id(m)] for n, m in named.items() if id(m) in places}, states


@contextmanager
def keeping_nothing(module: nn.Module, nth: int | None, step: str) -> Iterator[None]:
    """Refuse a step that keeps what the hook at the end would know of one rank's samples only."""
    if nth is not None:
        raise UserError(
            f"{AT_END[0]} would be called for each of the validation loaders by itself.",
            remedy="Log in validation_step, which does it for each, too.",
        )
    before = _kept(module)
    yield
    if changed := [n for n, held in _kept(module).items() if before.get(n) != held]:
        raise UserError(
            f"{step} changes {listed(changed)}, of which the end of the evaluation would know one "
            "rank's samples.",
            remedy="Log the value in the step, or keep it in a metric of torchmetrics (MeanMetric, "
            "CatMetric): those are put together.",
        )


def _kept(module: nn.Module) -> dict[str, Any]:
    return {**model_prints(module), **{n: b._version for n, b in module.named_buffers()}}  # noqa: SLF001


class WholeMetrics(ComputedOnce):
    """A metric object: computes a module's metrics, and calls its hook, once for all batches."""

    gives_loss = True

    def take(self, outputs: dict[str, Any]) -> Any:
        """Return what `take_states` has of a batch, and whether it is of a test."""
        return outputs.get("metrics", ({}, {}, False))  # none where only a loss is tried

    def compute(self) -> dict[str, Any]:
        """Return what the metrics are over all samples, by logged name, and what the hook logs."""
        module = self.by.of() or self.by.built()
        names, states = dict[str, str](), defaultdict[str, list[Any]](list)
        for of_batch, its, _ in self.seen:
            names |= of_batch
            for place, state in its.items():
                states[place].append(state)
        for place, of_batches in states.items():
            put_into(module.get_submodule(place), of_batches)
        values = {name: module.get_submodule(place).compute() for name, place in names.items()}
        hook = getattr(module, AT_END[any(tests for *_, tests in self.seen)])
        _, logged = noted(hook)
        counts = {n: getattr(m, "_update_count", 0) for n, m in module.named_modules()}
        for metric in metrics_of(module):
            metric.reset()
        if late := [place for place, count in counts.items() if count and place not in states]:
            raise UserError(
                f"{hook.__name__}{defined_at(hook)} updates {listed(late)}, which would have to "
                "last from one evaluation to the next; no checkpoint holds it.",
                remedy="Leave it out: records have each evaluation, and --monitor keeps the best.",
            )
        self.by.ended |= {plain_name(name): name for name in logged}
        return values | {plain_name(name): value for name, value in logged.items()}
