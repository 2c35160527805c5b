"""Metrics over many batches: sums of values per sample, metric objects, confusion counts.

A metric object is one of torchmetrics, or has the same methods: `update`, `compute`, `reset`, and a
state that can be gathered from all ranks. One with `evaluated_alone` is not measured in training,
and computes several values by name; with `gives_loss` one may be the loss of the evaluation.
"""

import copy
import warnings
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samestep.base.errors import UserError, blame, defined_at
from samestep.base.trees import describe, tree_leaves
from samestep.core.learner.agreement import sum_over_parts
from samestep.core.recipe import is_cross_entropy
from samestep.launch.ranks.world import World

States = dict[str, dict[str, Any]]
"""Name of a metric object → name of a state → a tensor, or a list of tensors."""


def is_object(metric: Any) -> bool:
    """Whether a metric gathers a state, rather than returning one value a sample."""
    return all(callable(getattr(metric, name, None)) for name in ("update", "compute", "reset"))


def functions_of(metrics: Mapping[str, Any]) -> dict[str, Callable[[Any, Any], Any]]:
    """Return the metrics that return one value a sample."""
    return {name: metric for name, metric in metrics.items() if not is_object(metric)}


def in_training(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics that are measured in training, too."""
    return {n: m for n, m in metrics.items() if not getattr(m, "evaluated_alone", False)}


def values_of(name: str, metric: Callable[..., Any], outputs: Any, targets: Any, count: int) -> Any:
    """Return a metric's values of a batch: (samples,)."""
    value = explained(f"metric {name!r}", metric, outputs, targets)
    if not isinstance(value, Tensor) or value.shape != (count,):
        raise UserError(
            f"The recipe's metric {name!r}{defined_at(metric)} returned {describe(value)} for "
            f"{count} samples; it must be one value per sample, ({count},): samestep reduces sums "
            "and counts. If it needs all predictions at once, use a torchmetrics.Metric."
        )
    return value


def explained(field: str, function: Callable[..., Any], outputs: Any, targets: Any) -> Any:
    """Call a recipe's function with outputs and targets; a failure names the recipe."""
    try:
        return function(outputs, targets)
    except Exception as error:
        trees = f"outputs {describe(outputs)} and targets {describe(targets)}"
        remedy = remedy_of(error, outputs, targets, function)
        blame(f"The recipe's {field} failed with {trees}", error, function, remedy=remedy)


_OTHER_SHAPE = (
    "Their shapes differ: give both the shape that it takes, or write a function (outputs, "
    "targets) that does."
)
_NO_CLASSES = (
    "Classes are whole numbers: targets.long(). For continuous targets, use another loss, such as "
    "nn.functional.mse_loss."
)


def remedy_of(error: Exception, outputs: Any, targets: Any, function: object) -> str:  # noqa: PLR0911
    """Return what to do where a library's loss or metric fails for a common reason, else ''.

    Not for a user's own function: its failing line says enough.
    """
    if defined_at(function) or isinstance(targets, dict):
        return ""
    if not isinstance(outputs, Tensor):
        hint = "end forward with `return`" if outputs is None else "return only that"
        return f"The model returns a {type(outputs).__name__} where a tensor is needed: {hint}."
    if not isinstance(targets, Tensor):
        return ""
    same = targets.shape == outputs.shape
    if not is_cross_entropy(function):
        return "" if same else _OTHER_SHAPE
    if isinstance(error, IndexError):
        num = outputs.shape[1:2].numel()
        return f"The model has {num} outputs, so classes are 0 to {num - 1}."
    if targets.shape[1:] == (1,):
        return "Classes are one number per sample, (batch,): targets.squeeze(1)."
    return "" if same or targets.dtype == torch.int64 else _NO_CLASSES


_AS_LOGITS, _OUTSIDE = "as logits", "outside [0, 1]"
"""Next to the states of a metric: those of its twin, and whether these are what counts."""


class Objects:
    """This rank's copies of a recipe's metric objects, empty at first.

    One that may take its predictions for logits has a twin, which always does: see `logits`.
    """

    def __init__(self, metrics: Mapping[str, Any], device: torch.device) -> None:
        self._metrics = {n: copy.deepcopy(m) for n, m in metrics.items() if is_object(m)}
        for name, metric in self._metrics.items():
            if not getattr(metric, "_reductions", None):
                raise UserError(
                    f"The recipe's metric {name!r} is a {type(metric).__name__} without a state "
                    "that ranks can combine. Use a torchmetrics.Metric whose add_state() names its "
                    "states, or a function (outputs, targets) → one value per sample."
                )
            metric.to(device)
        if self._metrics:
            from samestep.core.training import logits  # noqa: PLC0415

            self._taken = partial(logits.taking_predictions, logits.places())
        self.reset()

    def __bool__(self) -> bool:
        return bool(self._metrics)

    def reset(self) -> None:
        """Begin anew."""
        self._earlier: list[States] = []
        """What other ranks had gathered, before the training continued on another number of them:
        only sums can be continued from the states of several."""
        self._clear()

    def _clear(self) -> None:
        self._twins: dict[str, tuple[Any, Tensor]] = {}  # and whether it is what counts
        for metric in self._metrics.values():
            metric.reset()

    def update(self, outputs: Any, targets: Any) -> None:
        """Take in a batch."""
        if not self._metrics:
            return
        with self._taken() as taking:
            for name, metric in self._metrics.items():
                taking.as_logits, taking.outside = False, []
                explained(f"metric {name!r}", metric.update, outputs, targets)
                self._update_twin(name, taking, outputs, targets)

    def _update_twin(self, name: str, taking: Any, outputs: Any, targets: Any) -> None:
        """Give a metric's twin what the metric was just given, if that may be taken for logits."""
        outside_now = taking.checked(name)
        if outside_now is None:
            return
        twin, outside = self._twins.get(name) or (self._new_twin(self._metrics[name]), outside_now)
        taking.as_logits = True
        explained(f"metric {name!r}", twin.update, outputs, targets)
        self._twins[name] = twin, outside | outside_now

    def _new_twin(self, metric: Any) -> Any:
        twin = copy.deepcopy(metric)
        twin.reset()
        return twin

    def states(self) -> list[States]:
        """Return the states of this rank's metrics that have samples, on the CPU."""
        own = {n: states_of(m) for n, m in self._metrics.items() if m._update_count}  # noqa: SLF001
        for name, (twin, outside) in self._twins.items():
            own[name] |= {_AS_LOGITS: states_of(twin), _OUTSIDE: outside.cpu()}
        return [*self._earlier, own] if own else self._earlier

    def load(self, states: Sequence[States]) -> None:
        """Replace the state by what `states` returned, on one rank or on several."""
        self.reset()
        if len(states) == 1:
            self._put_together(states)
        else:
            self._earlier = list(states)

    def _put_together(self, of_ranks: Sequence[States]) -> None:
        """Combine states of ranks, those of twins, too."""
        self._clear()
        for name, metric in self._metrics.items():
            ranks = [states[name] for states in of_ranks if name in states]
            put_into(metric, ranks)
            if twins := [states[_AS_LOGITS] for states in ranks if _AS_LOGITS in states]:
                outside = torch.stack([states[_OUTSIDE] for states in ranks if _OUTSIDE in states])
                self._twins[name] = self._new_twin(metric), outside.any().to(metric.device)
                put_into(self._twins[name][0], twins)

    def next_part(self) -> None:
        """Keep the state so far apart: another part of the data begins."""
        self._earlier = self.states()
        self._clear()

    def values(
        self, world: World, without: Container[str] = (), states: Sequence[States] | None = None
    ) -> dict[str, float]:
        """Return each metric over all samples of all ranks; every rank calls it."""
        if not self._metrics:
            return {}
        ranks = world.gather(self.states() if states is None else states)
        whole = Objects(self._metrics, torch.device("cpu"))
        whole._put_together([states for rank in ranks for states in rank])

        def computed() -> dict[str, float]:
            values: dict[str, float] = {}
            for name, metric in whole._decided().items():
                if name not in without:
                    values |= _numbers(name, metric)
            return values

        # What a user's code computes may differ by rank, and decides how the training continues.
        return world.broadcast(world.on_every(computed))

    def _decided(self) -> dict[str, Any]:
        """Return of each metric what counts: itself or its twin."""
        twins = {name: twin for name, (twin, outside) in self._twins.items() if outside}
        return self._metrics | twins

    def check(self) -> list[str]:
        """Check that each metric computes numbers, where it can compute yet; return their names."""
        decided = self._decided().items()
        return [number for name, metric in decided for number in _numbers(name, metric, early=True)]


def states_of(metric: Any) -> dict[str, Any]:
    """Return a metric's states by name, on the CPU."""
    return {name: _on(getattr(metric, name), "cpu") for name in metric._reductions}  # noqa: SLF001


def put_into(metric: Any, ranks: Sequence[dict[str, Any]]) -> None:
    """Combine states as torchmetrics does: stack or flatten, then reduce."""
    for name, reduction in metric._reductions.items() if ranks else ():  # noqa: SLF001
        values = [states[name] for states in ranks]
        if isinstance(values[0], list):
            combined: Any = [tensor for value in values for tensor in value]
        elif len(values) == 1:
            (combined,) = values
        else:
            stacked = torch.stack(values)
            combined = stacked if reduction is None else reduction(stacked)
        setattr(metric, name, _on(combined, metric.device))
    metric._update_count = len(ranks)  # noqa: SLF001 - it has been updated, on other ranks


def _numbers(name: str, metric: Any, *, early: bool = False) -> dict[str, float]:
    """Return a metric's values; `early`: over few samples, perhaps all of one class."""
    # It has the states of all ranks already: torchmetrics would add up equal ones once per rank. It
    # reads `sync_on_compute` when a metric is made, and this from then on.
    metric._to_sync = False  # noqa: SLF001
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of metrics that no sample of a small set reaches
            value = metric.compute()
    except Exception as error:
        if early and not isinstance(error, UserError):
            return {}
        blame(f"The recipe's metric {name!r} failed to compute", error)
    several = getattr(metric, "evaluated_alone", False)
    return {n: _number(n, item) for n, item in (value if several else {name: value}).items()}


def _number(name: str, value: Any) -> float:
    if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
        return float(value)
    raise UserError(
        f"The recipe's metric {name!r} computed {describe(value)}; it must be a single number. "
        'Average over classes (average="macro"), or name one metric for each.'
    )


def _on(value: Any, device: Any) -> Any:
    if isinstance(value, list):
        return [_on(one, device) for one in value]
    return value.detach().to(device) if isinstance(value, Tensor) else value


_MOST_STEPS, _MOST_BYTES = 64, 16 << 20


class StepOutputs(NamedTuple):
    """The outputs and targets of one forward in training."""

    outputs: Any
    """Detached."""
    targets: Any
    samples: int
    part: int = 0
    """The virtual rank."""


class EpochMetrics:
    """Metrics of what this rank has trained in the running epoch, one set per part.

    `parts` are this rank's virtual ranks. With `by_step` an object takes in each step by itself, so
    that its bits do not depend on when the sums are updated.
    """

    def __init__(
        self,
        metrics: Mapping[str, Any],
        device: torch.device,
        parts: range = range(1),
        *,
        by_step: bool = False,
    ) -> None:
        self._first, metrics = parts.start, in_training(metrics)
        self._parts = [_PartMetrics(metrics, device, by_step=by_step) for _ in parts]

    def __bool__(self) -> bool:
        return bool(self._parts[0])

    def reset(self) -> None:
        """Begin a new epoch."""
        for part in self._parts:
            part.reset()

    def add(self, steps: Sequence[StepOutputs]) -> None:
        """Keep outputs; measure them once there are many."""
        alone = len(self._parts) == 1
        for outputs in steps:
            self._parts[0 if alone else outputs.part - self._first].add(outputs)

    def settle(self) -> None:
        """Update the sums; the host waits for the device."""
        for part in self._parts:
            part.settle()

    def means(self, world: World, expected: int) -> dict[str, float]:
        """Return each metric over all ranks' samples, after `settle`; every rank calls it.

        Nothing if some of the expected samples were not measured: the epoch began in an earlier
        version, or before the recipe had the metric.
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
        sums = dict(zip(some.functions, totals, strict=False))
        means = {n: total / samples for n, total in sums.items() if n not in late}
        states = [state for part in self._parts for state in part.objects.states()]
        return {**means, **some.objects.values(world, late, states)}

    def state(self) -> list[dict[str, Any]]:
        """Return each part's state for a checkpoint, after `settle`."""
        return [part.state() for part in self._parts]

    def load(self, parts: Sequence[Sequence[dict[str, Any]]]) -> None:
        """Continue from what a checkpoint has: for each part here, that of one or more parts."""
        for place, part in enumerate(self._parts):
            part.load(parts[place] if place < len(parts) else ())


class _PartMetrics:
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
        self._seen: list[StepOutputs] = []
        self._most = self._most_steps
        self._unread: list[Tensor] = []
        self._sums, self._samples = [0.0] * len(self.functions), 0
        self.late: set[str] = set()
        """Metrics that the recipe gained within the epoch: they have not seen all of it."""
        self.objects.reset()

    def add(self, step: StepOutputs) -> None:
        """Keep outputs; measure them once there are many, or their form changes."""
        self._samples += step.samples
        if len(self._seen) == self._most or (self._seen and not _can_join(step, self._seen[0])):
            self._measure_kept()
        if not self._seen:
            leaves = [leaf for leaf in tree_leaves(step.outputs) if isinstance(leaf, Tensor)]
            each = max(1, sum(leaf.nbytes for leaf in leaves))
            self._most = max(1, min(self._most_steps, _MOST_BYTES // each))
        self._seen.append(step)

    def _measure_kept(self) -> None:
        steps, self._seen = self._seen, []
        if not steps:
            return
        outputs, targets, samples, _part = steps[0]
        if len(steps) > 1:
            outputs = torch.cat([step.outputs for step in steps])
            targets = torch.cat([step.targets for step in steps])
        count = samples * len(steps)
        with torch.no_grad():
            self.objects.update(outputs, targets)
            values = [values_of(n, f, outputs, targets, count) for n, f in self.functions.items()]
            if values:
                # Of each step by itself, so that the sum does not depend on what was put together.
                rows = torch.stack([value.to(self._home).double() for value in values])
                self._unread.append(rows.view(len(values), len(steps), samples).sum(dim=2).T)

    def settle(self) -> None:
        """Update the sums; the host waits for the device."""
        self._measure_kept()
        if self._unread:
            for row in torch.cat(self._unread).tolist():
                self._sums = [total + value for total, value in zip(self._sums, row, strict=True)]
            self._unread = []

    def row(self) -> list[float]:
        """Return the sums, which metrics are late, and the samples."""
        return [*self._sums, *(float(name in self.late) for name in self.names), self._samples]

    def state(self) -> dict[str, Any]:
        """Return this rank's state for a checkpoint, after `settle`."""
        named: list[States] = [dict(zip(self.functions, self._sums, strict=True))]  # type: ignore[arg-type]
        sums, *states = (
            {name: value for name, value in values.items() if name not in self.late}
            for values in named + self.objects.states()
        )
        return {"sums": sums, "states": states, "samples": self._samples}

    def load(self, ranks: Sequence[dict[str, Any]]) -> None:
        """Continue from what some ranks have measured."""
        self.reset()
        if not ranks:
            return
        self._samples = sum(rank["samples"] for rank in ranks)
        self._sums = [sum(rank["sums"].get(n, 0.0) for rank in ranks) for n in self.functions]
        self.objects.load([states for rank in ranks for states in rank["states"]])
        for rank in ranks:
            if rank["samples"]:
                names = {*rank["sums"], *(name for states in rank["states"] for name in states)}
                self.late |= set(self.names) - names


def _can_join(first: StepOutputs, other: StepOutputs) -> bool:
    for mine, its in ((first.outputs, other.outputs), (first.targets, other.targets)):
        if not (isinstance(mine, Tensor) and isinstance(its, Tensor) and mine.shape == its.shape):
            return False
    sizes = {(first.samples,), (other.samples,), first.outputs.shape[:1], first.targets.shape[:1]}
    return len(sizes) == 1  # a single number for the batch has no rows


class Confusion:
    """Count targets against predictions, batch by batch, exactly on any number of ranks."""

    def __init__(self, classes: Sequence[str], device: torch.device) -> None:
        self._classes = classes
        num = len(classes)
        # The last cell counts targets outside the classes; int64, so that sums are exact.
        self._counts = torch.zeros(num * num + 1, dtype=torch.int64, device=device)

    def add(self, outputs: Any, targets: Any) -> None:
        """Count one batch: outputs (batch, classes), the largest predicts; targets (batch,)."""
        num = len(self._classes)
        fits = isinstance(outputs, Tensor) and outputs.shape[1:] == (num,)
        if not fits or not isinstance(targets, Tensor) or targets.dim() != 1:
            shapes = [tuple(getattr(t, "shape", ())) for t in (outputs, targets)]
            raise UserError(
                f"The recipe's data names {num} classes, so outputs must be (batch, {num}) and "
                f"targets (batch,); they are {shapes[0]} and {shapes[1]}. Give as many names as "
                "the model has outputs, or leave Splits(classes=…) out.",
                on_all_ranks=True,
            )
        has_class = (targets >= 0) & (targets < num)
        cells = torch.where(has_class, targets.long() * num + outputs.argmax(dim=1), num * num)
        cells = cells.to(self._counts.device)
        # bincount() would ask the device for the largest, and the host would wait.
        self._counts.index_add_(0, cells, torch.ones_like(cells))

    def result(self, world: World) -> dict[str, Any]:
        """Return the counts of all ranks.

        `per_class` is the accuracy of each class (None without samples); `confusion` has a row of
        counts per target and a column per prediction.
        """
        num = len(self._classes)
        counts = world.reduce(self._counts.cpu())
        if counts[-1]:
            raise UserError(
                f"{int(counts[-1])} targets lie outside 0 to {num - 1}, the places of the "
                f"{num} classes that the recipe's data names.",
                on_all_ranks=True,
            )
        rows: list[list[int]] = counts[:-1].view(num, num).tolist()
        per_class = {
            name: row[place] / sum(row) if sum(row) else None
            for place, (name, row) in enumerate(zip(self._classes, rows, strict=True))
        }
        return {"per_class": per_class, "confusion": rows}
