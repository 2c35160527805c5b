"""Metrics of torchmetrics in a LightningModule, over all samples of an evaluation and all ranks.

Each batch leaves their states, and the ranks put these together at the end. Then the metrics that
were logged are computed, and the module's hook at the end of an evaluation is called.
"""

import copy
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn

from samestep.base.errors import UserError, blame, listed
from samestep.base.trees import map_tensors, tree_leaves
from samestep.bridges.lightning.logged import (
    REDUCTIONS,
    Reduced,
    is_kept,
    keep_best,
    metrics_of,
    noted,
    plain_name,
    reset_metrics,
)
from samestep.core.learner.gathered import ComputedOnce
from samestep.core.learner.side_effects import keep_buffers, model_prints
from samestep.core.training.evaluation import as_evaluated
from samestep.core.training.metrics import put_into, states_of

AT_END = {"validation_step": "on_validation_epoch_end", "test_step": "on_test_epoch_end"}
"""A step → the hook that Lightning calls after all of its batches."""
_ALWAYS_WRONG = (AttributeError, NameError, TypeError)
"""Errors of a hook that are not due to the few samples of a trial."""


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
    now = [m for m in metrics if m._update_count and not is_kept(m)]  # noqa: SLF001
    states = {places[id(m)]: states_of(m) for m in now}
    reset_metrics(module)
    return {n: places[id(m)] for n, m in named.items() if id(m) in places}, states


@contextmanager
def keeping_nothing(module: nn.Module, nth: int | None, step: str) -> Iterator[None]:
    """Refuse a step that keeps what the hook at the end would know of one rank's samples only."""
    if nth is not None:
        raise UserError(
            f"{AT_END['validation_step']} would be called for each of the validation loaders, not "
            "once for all.",
            remedy="Log in validation_step, which gives each loader its own values.",
        )
    before, _alive = _kept(module), [*module.buffers()]
    yield
    if changed := [n for n, held in _kept(module).items() if before.get(n) != held]:
        raise UserError(
            f"{step} changes {listed(changed)}. At the end of the evaluation that would hold the "
            "samples of one rank only.",
            remedy="Log the value in the step, or keep it in a torchmetrics metric (MeanMetric, "
            "CatMetric), which samestep merges over the ranks.",
        )


Place = tuple[str, ...]
"""Of a list among the attributes of a module, also in a dict: its names."""


def lists_of(module: nn.Module) -> dict[Place, list[Any]]:
    """Return the lists of a module, also those in its dicts, in which a step may collect."""
    own: dict[Place, Any] = {(name,): value for name, value in vars(module).items()}
    dicts = [(name, value) for (name,), value in own.items() if isinstance(value, dict)]
    own |= {(name, key): value for name, held in dicts for key, value in held.items()}
    return {place: value for place, value in own.items() if type(value) is list}


def take_collected(
    module: nn.Module, sizes: Mapping[Place, int] | None, logged: dict[str, Any]
) -> dict[Place, list[Any]]:
    """Take what a step has added to a module's lists, and of what it logs that with `reduce_fx`."""
    reduced = [name for name, value in logged.items() if isinstance(value, Reduced)]
    added: dict[Place, list[Any]] = {("", name): [logged.pop(name)] for name in reduced}
    if sizes is None:
        return added
    for place, held in lists_of(module).items():
        if new := held[sizes.get(place, 0) :]:
            del held[-len(new) :]
            added[place] = map_tensors(lambda tensor: tensor.detach().cpu(), new)
            if len(place) == 2 and place not in sizes:  # as in a defaultdict
                del vars(module)[place[0]][place[1]]
    return added


@contextmanager
def _with_collected(module: Any, added: Mapping[Place, list[Any]]) -> Iterator[None]:
    """Let the lists of a module have what the steps of all ranks have added, within this."""
    own, names = vars(module), {name for name, *_ in added}
    # A rank without samples has not what the hook at the start of an evaluation makes.
    before = {name: copy.copy(own[name]) for name in names & own.keys()}
    for place, new in added.items():
        owner = own if len(place) == 1 else own.setdefault(place[0], {})
        whole = map_tensors(lambda tensor: tensor.to(module.device), new)
        owner[place[-1]] = owner.get(place[-1], []) + whole
    try:
        yield
    finally:
        for name in names - before.keys():
            del own[name]
        own.update(before)


def _kept(module: nn.Module) -> dict[str, Any]:
    buffers = {n: (id(b), b._version) for n, b in module.named_buffers()}  # noqa: SLF001
    return {**model_prints(module), **buffers}


class WholeMetrics(ComputedOnce):
    """A metric object: computes a module's metrics, and calls its hook, once for all batches."""

    gives_loss = True

    def take(self, outputs: dict[str, Any]) -> Any:
        """Return what `take_states` has of a batch, and the step that it was in."""
        return outputs.get("metrics", ({}, {}, "", {}))  # none where only a loss is tried

    def update(self, outputs: Any, batch: Any) -> None:
        """Take in a batch. States that are sums are added up: a matrix of classes is large."""
        super().update(outputs, batch)
        if len(self.seen) == 1:
            return
        (names, states, step, lists), (more, its, _, added) = self.seen[-2:]
        get, total = self._module().get_submodule, sys.modules["torchmetrics"].utilities
        kinds = {kind for place in its for kind in get(place)._reductions.values()}  # noqa: SLF001
        if states.keys() == its.keys() and kinds <= {total.dim_zero_sum}:
            sums = {p: {n: v + its[p][n] for n, v in held.items()} for p, held in states.items()}
            lists = {p: lists.get(p, []) + added.get(p, []) for p in {**lists, **added}}
            self.seen[-2:] = [(names | more, sums, step, lists)]

    def _module(self) -> Any:
        return self.by.of() or self.by.built()

    def compute(self) -> dict[str, Any]:
        """Return what the metrics are over all samples, by logged name, and what the hook logs."""
        module = self._module()
        names, states = dict[str, str](), defaultdict[str, list[Any]](list)
        lists = defaultdict[Place, list[Any]](list)
        for of_batch, its, _, added in self.seen:
            names |= of_batch
            for where, new in added.items():
                lists[where] += new
            for place, state in its.items():
                states[place].append(state)
        for place, of_batches in states.items():
            put_into(module.get_submodule(place), of_batches)
        values = {name: module.get_submodule(place).compute() for name, place in names.items()}
        for where in [where for where in lists if not where[0]]:  # logged with `reduce_fx`
            parts = lists.pop(where)
            values[where[1]] = REDUCTIONS[parts[0].by](float(part.value) for part in parts)
        self._note_means(lists)
        with _with_collected(module, lists):
            logged = self._ended(module)
        for place in states:
            module.get_submodule(place).reset()
        keep_best(module)
        counts = {n: m for n, m in module.named_modules() if getattr(m, "_update_count", 0)}
        late = [place for place, metric in counts.items() if not is_kept(metric)]
        reset_metrics(module)
        if late:
            raise UserError(
                f"The hook at the end of an evaluation updates {listed(late)}, whose state would "
                "have to last until the next evaluation, and no checkpoint holds it.",
                remedy="Leave the metric out: the records have each evaluation, and --monitor "
                "keeps the best checkpoint.",
            )
        self.by.ended |= {plain_name(name): name for name in logged}
        return values | {plain_name(name): value for name, value in logged.items()}

    def _note_means(self, lists: Mapping[Place, list[Any]]) -> None:
        """Say once that a mean over what was collected may depend on the number of ranks."""

        def is_mean(leaf: Any) -> bool:
            return isinstance(leaf, float) or (isinstance(leaf, Tensor) and not leaf.dim())

        means = [place for place, new in lists.items() if any(map(is_mean, tree_leaves(new)))]
        if means and not self.by.told and self.by.global_rank == 0 and "WORLD_SIZE" in os.environ:
            print(  # noqa: T201 - known only as it trains
                f"samestep: note: {listed(['.'.join(place) for place in means])} has a number of "
                "each batch. On several ranks, a mean over these depends on the number of ranks. "
                "Log the value in the step: samestep takes the mean over all samples.",
                file=sys.stderr,
                flush=True,
            )
        self.by.told |= bool(means)

    def _ended(self, module: Any) -> dict[str, Any]:
        """Call the hook, in eval mode and without a trace in the model; return what it logs."""
        steps = {step for _, _, step, _ in self.seen} & AT_END.keys()
        if not steps:
            return {}
        hook, put_back = getattr(module, AT_END[steps.pop()]), keep_buffers(module)
        try:
            with as_evaluated(module, 0):
                _, logged = noted(hook)
                objects = {n: v for n, v in logged.items() if isinstance(v, nn.Module)}
                metrics = {n: cast("Any", metric).compute() for n, metric in objects.items()}
        except _ALWAYS_WRONG as error:
            blame(f"{hook.__name__} failed", error, hook)
        finally:
            put_back()
        return logged | metrics
